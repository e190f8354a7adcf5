"""Samples of any kind as batches, prefetched by worker processes. The number of workers does not affect the batches."""

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

MAX_REPLACEMENTS = 20  # in a row; beyond that the data are unusable


class Reader(Protocol):
    """Reads samples in any order and collates them into batches; only the reader knows what a sample is."""

    def __len__(self) -> int: ...

    def read(self, index: int) -> Any:
        """The sample at `index`; random draws use the global generators. Raises SampleError if it is unusable."""
        ...

    def collate(self, samples: Sequence[Any], indices: list[int], bad: list[str]) -> Batch:
        """The samples, possibly none, as a batch. indices: their indices; bad: one line per unusable sample."""
        ...


@dataclass(frozen=True)
class Sample:
    """What the reader returned (None if unusable), its index, and one line per unusable sample met on the way."""

    content: Any
    index: int
    bad: list[str]


class Samples(Dataset[Sample]):
    """The samples of a reader by key; all their random draws depend on (seed, epoch, index) alone.

    on_bad: "error" raises SampleError for an unusable sample. "skip" replaces it with another, chosen by (seed, epoch, index);
    with replace=False, for evaluation, it leaves the sample out.
    """

    def __init__(self, reader: Reader, *, seed: int, on_bad: str = "error", replace: bool = True) -> None:
        self.reader, self.seed, self.skips, self.replace = reader, seed, on_bad == "skip", replace

    def __len__(self) -> int:
        return len(self.reader)

    def __getitem__(self, key: Key) -> Sample:
        index, bad = key.index, list[str]()
        for attempt in range(MAX_REPLACEMENTS):
            try:
                return Sample(self._read(Key(key.epoch, index)), index, bad)
            except SampleError as error:
                if not self.skips:
                    raise
                bad.append(str(error))
                if not self.replace:
                    return Sample(None, index, bad)
            index = derive("replacement", self.seed, key.epoch, key.index, attempt) % len(self.reader)
        raise DataError(f"{MAX_REPLACEMENTS} samples in a row are unusable, the last because {bad[-1]}; check the data")

    def _read(self, key: Key) -> Any:
        with seeded(derive("sample", self.seed, key.epoch, key.index)):
            return self.reader.read(key.index)


def batches(
    samples: Samples, keys: Iterable[list[Key]], *, num_workers: int = 0, pin_memory: bool = False
) -> Generator[Any, None, None]:
    """The batches of these keys, in order, prefetched by worker processes, which end when this generator is closed."""
    loader = DataLoader(
        _ErrorsAsValues(samples),
        batch_sampler=_BatchSampler(keys),
        num_workers=num_workers,
        collate_fn=partial(_collate, reader=samples.reader),
        pin_memory=pin_memory,
        worker_init_fn=_ignore_signals,
        generator=torch.Generator(),  # so that the loader does not draw from the global generator
    )
    iterator = iter(loader)
    if num_workers:
        _detect_dead_workers_while_waiting(iterator)
    try:
        for batch in iterator:
            if isinstance(batch, DataError):
                raise batch
            yield batch
    except (RuntimeError, ConnectionError, FileNotFoundError, EOFError) as error:
        # A worker that dies while it sends a batch breaks the connection before the loader notices its death.
        if isinstance(error, RuntimeError) and "DataLoader worker" not in str(error):
            raise
        raise DataError(
            "a data loading process was killed by the system, possibly for lack of memory; use fewer (--num-workers)"
        ) from error
    finally:
        # Workers ignore signals, so shut them down here: a propagating exception may keep the iterator alive.
        if num_workers:
            iterator._shutdown_workers()  # type: ignore[attr-defined]


def _detect_dead_workers_while_waiting(iterator: Any) -> None:
    """Lets the death of a worker surface only where its batch is waited for, within seconds.

    PyTorch would also raise an error from a signal handler, wherever the main process is: even during an update or a save.
    """
    signal_handling._remove_worker_pids(id(iterator))  # type: ignore[attr-defined]
    iterator._worker_pids_set = False


class _ErrorsAsValues(Dataset[Sample | DataError]):
    """The samples, with errors as values: raised in a worker, an error would arrive with a traceback as its message."""

    def __init__(self, samples: Samples) -> None:
        self.samples = samples

    def __getitem__(self, key: Key) -> Sample | DataError:
        try:
            return self.samples[key]
        except DataError as error:
            return error


class _BatchSampler:
    """The lists of keys, in the form that the loader expects."""

    def __init__(self, keys: Iterable[list[Key]]) -> None:
        self.keys = keys

    def __iter__(self) -> Iterator[list[Key]]:
        return iter(self.keys)


def _ignore_signals(worker: int) -> None:
    """Workers end with their parent process, which may want to finish its step first."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _collate(results: list[Sample | DataError], reader: Reader) -> Batch | DataError:
    samples = [one for one in results if isinstance(one, Sample)]
    if len(samples) < len(results):
        return next(one for one in results if isinstance(one, DataError))
    usable = [sample for sample in samples if sample.content is not None]
    bad = [line for sample in samples for line in sample.bad]
    return reader.collate([sample.content for sample in usable], [sample.index for sample in usable], bad)
