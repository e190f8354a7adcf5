"""Images of a source as batches of tensors. What is in a batch does not depend on the number of workers."""

import signal
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling

from polaformer.data.order import Key
from polaformer.data.randomness import derive, seeded
from polaformer.data.sources import Source
from polaformer.data.transforms import Transform
from polaformer.errors import DataError, ImageError

MOST_REPLACEMENTS = 20  # in a row: by then the data are beyond repair


@dataclass(frozen=True)
class Sample:
    """An image (C, H, W), None if it cannot be used; its label, its place in the source, and what was wrong on the way."""

    image: Tensor | None
    label: int
    index: int
    bad: list[str]


class Batch(NamedTuple):
    """Images (B, C, H, W), labels (B,), places in the source (B,), and a line for every image that could not be used."""

    images: Tensor
    labels: Tensor
    indices: Tensor
    bad: list[str]


class Samples(Dataset[Sample]):
    """The samples of a source by key; all random draws of a transform follow from (seed, epoch, index).

    on_bad_image: "error" raises ImageError; "skip" takes another image in its place, chosen by (seed, epoch, index), or, where
    the order matters (replace=False, for evaluation), leaves it out.
    """

    def __init__(
        self,
        source: Source,
        transform: Transform,
        *,
        channels: int,
        seed: int,
        on_bad_image: str = "error",
        replace: bool = True,
    ) -> None:
        self.source, self.transform, self.channels = source, transform, channels
        self.seed, self.skips, self.replace = seed, on_bad_image == "skip", replace

    def __len__(self) -> int:
        return len(self.source)

    def __getitem__(self, key: Key) -> Sample:
        index, bad = key.index, list[str]()
        for attempt in range(MOST_REPLACEMENTS):
            try:
                return Sample(self._image(Key(key.epoch, index)), self.source.labels[index], index, bad)
            except ImageError as error:
                if not self.skips:
                    raise
                bad.append(str(error))
                if not self.replace:
                    return Sample(None, self.source.labels[index], index, bad)
            index = derive("replacement", self.seed, key.epoch, key.index, attempt) % len(self.source)
        raise DataError(f"{MOST_REPLACEMENTS} images in a row cannot be used, the last because {bad[-1]}; check the data")

    def _image(self, key: Key) -> Tensor:
        image = self.source.read(key.index, self.channels)
        with seeded(derive("sample", self.seed, key.epoch, key.index)):
            return self.transform(image)


def batches(
    samples: Samples, keys: Iterable[list[Key]], *, num_workers: int = 0, pin_memory: bool = False
) -> Generator[Batch, None, None]:
    """The batches of these keys, in their order, read ahead by worker processes, which end when this generator is closed."""
    loader = DataLoader(
        _Telling(samples),
        batch_sampler=_Keys(keys),
        num_workers=num_workers,
        collate_fn=partial(_collate, channels=samples.channels),
        pin_memory=pin_memory,
        worker_init_fn=_ignore_signals,
        generator=torch.Generator(),  # the loader draws from it, and from nothing that training draws from
    )
    iterator = iter(loader)
    if num_workers:
        _expect_deaths_here_only(iterator)
    try:
        for batch in iterator:
            if isinstance(batch, DataError):
                raise batch
            yield batch
    except (RuntimeError, ConnectionError, FileNotFoundError, EOFError) as error:
        # A process that dies while it hands over a batch breaks the connection before it is missed.
        if isinstance(error, RuntimeError) and "DataLoader worker" not in str(error):
            raise
        raise DataError(
            "a process that reads data was ended by the system, perhaps for want of memory; use fewer (--num-workers)"
        ) from error
    finally:
        # They ignore signals, so they have to be told; an exception on its way out may keep the iterator alive.
        if num_workers:
            iterator._shutdown_workers()  # type: ignore[attr-defined]


def _expect_deaths_here_only(iterator: Any) -> None:
    """Lets the death of a worker be found where its batch is waited for, within seconds.

    PyTorch would also raise an error from a signal handler, wherever the main process happens to be: in the middle of an update
    or of a save.
    """
    signal_handling._remove_worker_pids(id(iterator))  # type: ignore[attr-defined]
    iterator._worker_pids_set = False


class _Telling(Dataset[Sample | DataError]):
    """The samples, with errors as values: raised in a worker process, they would come out with its traceback as their text."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __getitem__(self, key: Key) -> Sample | DataError:
        try:
            return self.samples[key]
        except DataError as error:
            return error


class _Keys:
    """Lists of keys, as the loader wants them."""

    def __init__(self, keys: Iterable[list[Key]]) -> None:
        self.keys = keys

    def __iter__(self) -> Iterator[list[Key]]:
        return iter(self.keys)


def _ignore_signals(worker: int) -> None:
    """Workers end with the process that they work for, which may first want to finish its step."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _collate(found: list[Sample | DataError], channels: int) -> Batch | DataError:
    samples = [one for one in found if isinstance(one, Sample)]
    if len(samples) < len(found):
        return next(one for one in found if isinstance(one, DataError))
    images = [sample.image for sample in samples if sample.image is not None]
    usable = [sample for sample in samples if sample.image is not None]
    return Batch(
        torch.stack(images) if images else torch.empty(0, channels, 1, 1),
        torch.tensor([sample.label for sample in usable], dtype=torch.int64),
        torch.tensor([sample.index for sample in usable], dtype=torch.int64),
        [line for sample in samples for line in sample.bad],
    )
