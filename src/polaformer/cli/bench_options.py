"""What the benchmarks' options share: shapes, lengths, repeats, threads, device, and where a figure goes."""

import os
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import TYPE_CHECKING

from polaformer.cli.errors import UsageError
from polaformer.cli.output import load, prepare_folder, steps
from polaformer.errors import nearest
from polaformer.extras import require

if TYPE_CHECKING:
    from polaformer.bench.contenders import Contender

Shape = tuple[int, int, int, int]  # batch, heads, tokens, head width
SHAPES = ("4,4,3136,32", "8,3,196,64", "1,8,16384,32", "1,4,65536,64")
WIDEST = 1024
TENSORS = 16  # of a shape's size that are alive at the same time, about


def check_repeats(rounds: int, seconds: float) -> None:
    """Raises UsageError unless something can be measured."""
    if rounds < 1:
        raise UsageError(f"--rounds is {rounds}; give at least 1")
    check_seconds(seconds)


def check_seconds(seconds: float) -> None:
    """Raises UsageError unless there is some time, and not all of it."""
    if not (seconds > 0 and isfinite(seconds)):
        raise UsageError(f"--seconds is {seconds}; give a positive number")


def check_threads(threads: int | None) -> None:
    """Raises UsageError for more threads than cores."""
    cores = os.cpu_count() or 1
    if threads is not None and not 1 <= threads <= cores:
        raise UsageError(f"--threads is {threads}; give 1 to {cores}, or leave it out for torch's own choice")


def check_device(device: str) -> None:
    """Raises UsageError for CUDA where there is none; PyTorch must be loaded already."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        raise UsageError("--device is cuda, but PyTorch finds no CUDA device here; use --device cpu, or see `polaformer env`")


def check_figure(figure: Path | None, *, possible: bool, needs: str) -> None:
    """Raises UsageError for a figure that cannot be drawn or written; needs: what is missing where it is not possible."""
    if figure is None:
        return
    if not possible:
        raise UsageError(f"--figure {figure} {needs}")
    if figure.suffix != ".png":
        raise UsageError(f"--figure is {figure}; give the name of a PNG file, for instance --figure {figure.stem}.png")
    require("train", "matplotlib")
    prepare_folder(figure.parent, "--figure")


def check_without(without: Sequence[str], names: Sequence[str], kept: str) -> None:
    """Raises UsageError unless each part stands in some name, and none in `kept`, which the others are compared with."""
    for part in without:
        if not any(part in name for name in names):
            hint = nearest(part, [word for name in names for word in name.replace("(", " ").replace(")", " ").split()])
            raise UsageError(f"--without has {part!r}, which is part of no name; {hint}there are: {'; '.join(names)}")
        if part in kept:
            raise UsageError(f"--without has {part!r}, but {kept} is what the others are compared with; leave it in")


def contenders_for(
    device: str, without: Sequence[str], *, backward: bool = True, for_memory: bool = False
) -> "tuple[dict[str, Contender], list[str]]":
    """Loads PyTorch, asks the backends, and gives the contenders that were asked for and work, with a line for each that not.

    for_memory: those too whose memory alone is of interest. Raises UsageError for a device or a name that there is not.
    """
    with steps({"loading PyTorch": 3.0, "asking the backends": 3.0}) as begin:
        begin("loading PyTorch")
        load("polaformer.bench")
        from polaformer.bench.contenders import CONTENDERS, FOR_MEMORY, YARDSTICK, working

        check_device(device)
        more = FOR_MEMORY if for_memory else {}
        check_without(without, [*CONTENDERS, *more], YARDSTICK)
        begin("asking the backends")  # one may be built now
        there, notes = working(device, backward=backward)
    return {name: one for name, one in (there | more).items() if not any(part in name for part in without)}, notes


def shapes_of(shapes: Sequence[str], lengths: Sequence[int], batch: int, heads: int, width: int) -> list[Shape]:
    """The shapes as numbers, those of `lengths` if there are any; raises UsageError for what makes no sense."""
    if not lengths:
        if not shapes:
            raise UsageError("--shapes is empty; give at least one, for instance --shapes 4,4,3136,32")
        return list(dict.fromkeys(_parse_shape(text) for text in shapes))
    if tuple(shapes) != SHAPES:
        raise UsageError("--shapes and --lengths were both given; give shapes, or lengths with --batch, --heads and --width")
    if len(set(lengths)) < 2:
        raise UsageError(f"--lengths is {lengths[0]}; a slope needs at least two different lengths, as in --lengths 4096 8192")
    where = "--lengths with --batch, --heads and --width makes"
    return [_checked_shape((batch, heads, n, width), where) for n in sorted(set(lengths))]


def shape_text(shape: Shape) -> str:
    """As it is given on the command line."""
    return ",".join(str(size) for size in shape)


def _parse_shape(text: str) -> Shape:
    try:
        batch, heads, tokens, width = (int(part) for part in text.split(","))
    except ValueError:
        raise UsageError(
            f"--shapes has {text!r}; give four whole numbers with commas: batch,heads,tokens,head width, as in 4,4,3136,32"
        ) from None
    return _checked_shape((batch, heads, tokens, width), "--shapes has")


def _checked_shape(shape: Shape, where: str) -> Shape:
    batch, heads, tokens, width = shape
    text = shape_text(shape)
    if min(batch, heads, tokens) < 1 or not 2 <= width <= WIDEST:
        raise UsageError(f"{where} '{text}'; batch, heads and tokens must be at least 1, the head width between 2 and {WIDEST}")
    needed, there_is = TENSORS * 4 * batch * heads * tokens * width, _memory()
    if there_is is not None and needed > there_is:
        raise UsageError(
            f"{where} '{text}', which needs about {needed / 1e9:.0f} GB, but this machine has {there_is / 1e9:.0f} GB; "
            "give a smaller one"
        )
    return shape


def _memory() -> int | None:
    """The machine's memory in bytes, where the system tells."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else None
