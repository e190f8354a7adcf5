"""Trainings in processes of their own that can be killed at any point, and what is left of them.

Processes are forked from a server that has everything imported, so that one starts in a moment.
"""

import json
import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.torch import load

from polaformer.recipes.classification import Classification

PRELOADED = ["polaformer.recipes.running", "sklearn.datasets", "torch.utils.tensorboard", "timm", "faults"]
STEPS = 40

# 160 images in 4 epochs of 10 updates of two parts; mixup, drop path, an average of weights: everything that a resumed run
# could get wrong.
TINY = Classification(
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
    """Where a process kills itself. The n-th time that `event` is told of, or at the n-th system call of saves."""

    event: str
    number: int
    rank: int = 0
    signal: int = signal.SIGKILL


def write_data(path: Path, num_train: int = 160, num_test: int = 23) -> str:
    """Real digits as an array file."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = np.round(found.images * (255 / 16)).astype(np.uint8)
    train, test = slice(0, num_train), slice(num_train, num_train + num_test)
    np.savez(path, x_train=images[train], y_train=found.target[train], x_test=images[test], y_test=found.target[test])
    return str(path)


def spawn(target: Callable[..., None], *arguments: Any) -> BaseProcess:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=target, args=arguments)
    process.start()
    return process


def run(folder: Path, recipe: Classification, kill: Kill | None = None, processes: int = 1, port: int = 0) -> list[int]:
    """Begins or resumes a training in so many processes, waits for its end, and returns the exit codes."""
    started = [spawn(_child, folder, recipe, kill, rank, processes, port) for rank in range(processes)]
    for process in started:
        process.join(60)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise AssertionError("a process did not end within a minute")
    return [process.exitcode or 0 for process in started]


def _child(folder: Path, recipe: Classification, kill: Kill | None, rank: int, processes: int, port: int) -> None:
    import torch

    from polaformer.errors import StoppedError
    from polaformer.recipes.running import resume, train

    torch.set_num_threads(1)
    os.dup2(os.open(folder.parent / f"{folder.name}-stderr-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    if processes > 1:
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": processes, "LOCAL_WORLD_SIZE": processes}
        os.environ.update({name: str(value) for name, value in names.items()})
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
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
    told = 0
    if kill and kill.event in ("system call", "half a write"):
        _kill_at_system_call(kill)

    def watch(event: str, record: dict[str, Any]) -> None:
        nonlocal told
        if kill and event == kill.event:
            told += 1
            if told == kill.number:
                os.kill(os.getpid(), kill.signal)

    return watch


CALLS = ("makedirs", "mkdir", "open", "write", "fsync", "close", "rename", "unlink", "rmdir")


def record_calls(log: list[tuple[str, str]]) -> dict[str, Any]:
    """Puts every system call of saves into a log; returns what to put back."""
    originals = {name: getattr(os, name) for name in CALLS}
    for name, original in originals.items():

        def recorded(first: Any, *rest: Any, _name: str = name, _original: Any = original, **options: Any) -> Any:
            log.append((_name, str(first)))
            return _original(first, *rest, **options)

        setattr(os, name, recorded)
    return originals


def _kill_at_system_call(kill: Kill) -> None:
    """Counts the calls made by the module that saves, and kills before the n-th; or in the middle of a write."""
    from polaformer.training import checkpoint

    class Counting:
        """`os`, as that module sees it."""

        calls = 0

        def __getattr__(self, name: str) -> Any:
            original = getattr(os, name)
            if name not in CALLS:
                return original

            def counted(*arguments: Any, **options: Any) -> Any:
                if kill.event == "half a write" and name != "write":
                    return original(*arguments, **options)
                Counting.calls += 1
                if Counting.calls == kill.number:
                    if kill.event == "half a write":
                        original(arguments[0], arguments[1][: len(arguments[1]) // 2])
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*arguments, **options)

            return counted

    checkpoint.os = Counting()  # type: ignore[assignment]


def outcome(folder: Path) -> dict[str, Any]:
    """All that a run leaves behind, but for times measured with a clock."""
    from polaformer.training import checkpoint, journal

    found = checkpoint.newest(folder / "checkpoints")
    assert found is not None
    # The order of a safetensors file's notes on itself is not fixed; its tensors are.
    files: dict[str, Any] = {name: _tensor_bytes(content) for name, content in found.files.items() if name != "state.json"}
    state = json.loads(found.files["state.json"])
    state.pop("wall")
    state["progress"].pop("journal")  # its bytes include the times
    lines = [{name: value for name, value in line.items() if name != "wall"} for line in journal.read(folder)]
    shipped = folder / "model.safetensors"
    return {"state": state, "journal": lines, "shipped": _tensor_bytes(shipped.read_bytes()), **files}


def _tensor_bytes(content: bytes) -> dict[str, tuple[tuple[int, ...], bytes]]:
    return {name: (tuple(one.shape), one.numpy().tobytes()) for name, one in load(content).items()}


def tiny(data: str, **changes: Any) -> Classification:
    return replace(TINY, data=data, **changes)
