"""Training runs in separate processes that can be killed at any point, and the outcome of such runs.

Processes are forked from a server that has already imported everything, so that they start quickly.
"""

import json
import multiprocessing
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from safetensors.torch import load

from polaformer.tasks.classification.recipe import ClassificationRecipe
from polaformer.tasks.recipe import Recipe

PRELOADED = ["polaformer.tasks.running", "polaformer.cli.main", "polaformer.analysis.report"]
PRELOADED += ["sklearn.datasets", "torch.utils.tensorboard", "timm", "faults", "commands"]
STEPS = 40

# 160 images in 4 epochs of 10 updates with two parts each, mixup, drop path and EMA: everything that a resumed run could get
# wrong.
TINY = ClassificationRecipe(
    name="test/tiny",
    model="pola_deit_tiny",
    img_size=8,
    patch_size=4,
    dims=(16,),
    depths=(2,),
    num_heads=(2,),
    mlp_ratios=(1.0,),
    drop_path_rate=0.3,
    mean=(0.3,),
    std=(0.4,),
    epochs=4,
    warmup_epochs=1,
    batch_size=16,
    accumulation=2,
    lr=1e-2,
    lr_images=0,
    ema_decay=0.9,
    crop_scale=(0.5, 1.0),
    crop_pct=1.0,
    num_workers=0,
    log_every=3,
    save_every=5,
)


@dataclass(frozen=True)
class Kill:
    """When a process kills itself: at the n-th `event` that the loop reports, or at the n-th system call of its saves."""

    event: str
    number: int
    rank: int = 0
    signal: int = signal.SIGKILL
    times: int = 1
    note: Path | None = None  # file to write the ids of its child processes to


def write_data(path: Path, num_train: int = 160, num_test: int = 23) -> str:
    """Write real digits to an array file, and return its path."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = np.round(found.images * (255 / 16)).astype(np.uint8)
    train, test = slice(0, num_train), slice(num_train, num_train + num_test)
    np.savez(path, x_train=images[train], y_train=found.target[train], x_test=images[test], y_test=found.target[test])
    return str(path)


def free_port() -> int:
    with closing(socket.socket()) as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def spawn(target: Callable[..., None], *arguments: Any) -> BaseProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=target, args=arguments)
    process.start()
    return process


def run(folder: Path, recipe: Recipe, kill: Kill | None = None, processes: int = 1, port: int = 0) -> list[int]:
    """Start or resume a training run in the given number of processes, wait for its end, and return the exit codes."""
    started = spawn_run_in_processes(folder, recipe, processes, port, kill)
    for process in started:
        process.join(60)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise AssertionError("a process did not end within a minute")
    return [process.exitcode or 0 for process in started]


def call(function: Callable[..., None], *arguments: Any, processes: int = 1, port: int = 0) -> None:
    """Call the function in the given number of connected processes, and wait for them."""
    started = [spawn(_called, function, arguments, rank, processes, port) for rank in range(processes)]
    for process in started:
        process.join(60)
        assert process.exitcode == 0, "see the error that it printed"


def _called(function: Callable[..., None], arguments: tuple[Any, ...], rank: int, processes: int, port: int) -> None:
    become(rank, processes, port)
    function(*arguments)
    sys.stderr.flush()
    os._exit(0)


def become(rank: int, processes: int, port: int) -> None:
    """Set the environment variables that torchrun would set."""
    import torch

    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # for data workers, as outside these tests
    if processes > 1:
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
        os.environ.update({name: str(value) for name, value in names.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def spawn_run(folder: Path, recipe: Recipe) -> BaseProcess:
    return spawn(_child, folder, recipe, None, 0, 1, 0)


def spawn_run_in_processes(
    folder: Path, recipe: Recipe, processes: int, port: int, kill: Kill | None = None
) -> list[BaseProcess]:
    return [spawn(_child, folder, recipe, kill, rank, processes, port) for rank in range(processes)]


def _child(folder: Path, recipe: Recipe, kill: Kill | None, rank: int, processes: int, port: int) -> None:
    from polaformer.errors import StoppedError
    from polaformer.tasks.running import resume, train

    become(rank, processes, port)
    os.dup2(os.open(folder.parent / f"{folder.name}-stderr-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    watch = _killer(kill if kill and kill.rank == rank else None)
    try:
        resume(folder, watch) if (folder / "config.json").exists() else train(recipe, folder, watch)
    except StoppedError as stop:
        os._exit(128 + stop.number)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def _killer(kill: Kill | None) -> Callable[[str, dict[str, Any]], None]:
    num_events = 0
    if kill and kill.event in ("system call", "half a write"):
        _kill_at_system_call(kill)

    def watch(event: str, record: dict[str, Any]) -> None:
        nonlocal num_events
        if kill and event == kill.event:
            num_events += 1
            if num_events == kill.number:
                if kill.note is not None:
                    kill.note.write_text(" ".join(str(child.pid) for child in psutil.Process().children()))
                for _ in range(kill.times):
                    os.kill(os.getpid(), kill.signal)

    return watch


CALLS = ("makedirs", "mkdir", "open", "write", "fsync", "close", "rename", "unlink", "rmdir")


class Counting:
    """A stand-in for `os` in a module: counts and logs system calls, and calls `before` in front of each."""

    def __init__(self, before: Callable[[int, str, tuple[Any, ...]], None] = lambda number, name, arguments: None) -> None:
        self.calls, self.before = 0, before
        self.log: list[tuple[str, str]] = []

    def __getattr__(self, name: str) -> Any:
        original = getattr(os, name)
        if name not in CALLS:
            return original

        def counted(*arguments: Any, **options: Any) -> Any:
            self.calls += 1
            self.log.append((name, str(arguments[0])))
            self.before(self.calls, name, arguments)
            return original(*arguments, **options)

        return counted


@contextmanager
def seen_by(module: Any, counting: Counting) -> Iterator[None]:
    module.os = counting
    try:
        yield
    finally:
        module.os = os


def _kill_at_system_call(kill: Kill) -> None:
    """Kill before the n-th system call of saves, or in the middle of their n-th write."""
    from polaformer.training import checkpoint

    writes = 0

    def before(number: int, name: str, arguments: tuple[Any, ...]) -> None:
        nonlocal writes
        if kill.event == "system call" and number == kill.number:
            os.kill(os.getpid(), signal.SIGKILL)
        if kill.event == "half a write" and name == "write":
            writes += 1
            if writes == kill.number:
                os.write(arguments[0], arguments[1][: len(arguments[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)

    checkpoint.os = Counting(before)  # type: ignore[assignment]


def saved_steps(folder: Path) -> list[int]:
    from polaformer.training import checkpoint

    return [int(path.name.split("-")[1]) for path in checkpoint.list_checkpoints(folder / "checkpoints")]


def errors(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.parent.glob(f"{folder.name}-stderr-*")))


def outcome(folder: Path) -> dict[str, Any]:
    """Everything that a run writes, except measured times."""
    from polaformer.training import checkpoint, journal

    found = checkpoint.newest(folder / "checkpoints")
    assert found is not None
    # The order of the metadata in a safetensors file is not fixed; compare the tensors.
    files: dict[str, Any] = {name: tensor_bytes(content) for name, content in found.files.items() if name != "state.json"}
    state = json.loads(found.files["state.json"])
    state.pop("wall")
    state["progress"].pop("journal")  # its size depends on the times
    lines = [{name: value for name, value in line.items() if name != "wall"} for line in journal.read(folder)]
    shipped = folder / "model.safetensors"
    return {"state": state, "journal": lines, "shipped": tensor_bytes(shipped.read_bytes()), **files}


def tensor_bytes(content: bytes) -> dict[str, tuple[tuple[int, ...], bytes]]:
    return {name: (tuple(one.shape), one.numpy().tobytes()) for name, one in load(content).items()}


def tiny(data: str, **changes: Any) -> ClassificationRecipe:
    return replace(TINY, data=data, **changes)
