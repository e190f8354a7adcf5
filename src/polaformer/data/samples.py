"""Samples of any kind as batches, read ahead by worker processes. What is in a batch does not depend on their number."""

import signal
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import signal_handling

from polaformer.data.batch import Batch
from polaformer.data.order import Key
from polaformer.data.randomness import derive, seeded
from polaformer.errors import DataError, SampleError

MOST_REPLACEMENTS = 20  # in a row: by then the data are beyond repair


class Reader(Protocol):
    """Samples that can be read in any order, and made into batches; what a sample is, only the reader knows."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> Any:
        """The sample at a place; random draws come from the global generators. Raises SampleError where it is unusable."""
        ...

    def collate(self, samples: Sequence[Any], indices: list[int], bad: list[str]) -> Batch:
        """The samples, perhaps none, as a batch; `indices` are their places, `bad` a line for each that could not be used."""
        ...


@dataclass(frozen=True)
class Sample:
    """What a reader gave, None if it cannot be used; its place, and what was wrong on the way."""

    content: Any
    index: int
    bad: list[str]


class Samples(Dataset[Sample]):
    """The samples of a reader by key; all their random draws follow from (seed, epoch, index).

    on_bad: "error" raises SampleError; "skip" takes another sample in its place, chosen by (seed, epoch, index), or, where
    the order matters (replace=False, for evaluation), leaves it out.
    """

    def __init__(self, reader: Reader, *, seed: int, on_bad: str = "error", replace: bool = True) -> None:
        self.reader, self.seed, self.skips, self.replace = reader, seed, on_bad == "skip", replace

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, key: Key) -> Sample:
        index, bad = key.index, list[str]()
        for attempt in range(MOST_REPLACEMENTS):
            try:
                return Sample(self._read(Key(key.epoch, index)), index, bad)
            except SampleError as error:
                if not self.skips:
                    raise
                bad.append(str(error))
                if not self.replace:
                    return Sample(None, index, bad)
            index = derive("replacement", self.seed, key.epoch, key.index, attempt) % len(self.reader)
        raise DataError(f"{MOST_REPLACEMENTS} samples in a row cannot be used, the last because {bad[-1]}; check the data")

    def _read(self, key: Key) -> Any:
        with seeded(derive("sample", self.seed, key.epoch, key.index)):
            return self.reader.read(key.index)


def batches(
    samples: Samples, keys: Iterable[list[Key]], *, num_workers: int = 0, pin_memory: bool = False
) -> Generator[Any, None, None]:
    """The batches of these keys, in their order, read ahead by worker processes, which end when this generator is closed."""
    loader = DataLoader(
        _Telling(samples),
        batch_sampler=_Keys(keys),
        num_workers=num_workers,
        collate_fn=partial(_collate, reader=samples.reader),
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


def _collate(found: list[Sample | DataError], reader: Reader) -> Batch | DataError:
    samples = [one for one in found if isinstance(one, Sample)]
    if len(samples) < len(found):
        return next(one for one in found if isinstance(one, DataError))
    usable = [sample for sample in samples if sample.content is not None]
    bad = [line for sample in samples for line in sample.bad]
    return reader.collate([sample.content for sample in usable], [sample.index for sample in usable], bad)
