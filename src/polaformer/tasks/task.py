"""A task as the commands see it: a subclass of Task, found in the registry. Needs no PyTorch until a method is called."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from polaformer.errors import SettingsError
from polaformer.tasks.recipe import Recipe
from polaformer.training.settings import workers_for_cores

if TYPE_CHECKING:
    from polaformer.tasks.job import Predictor

Advance = Callable[[], object]  # advances a progress bar by one sample


@dataclass(frozen=True, kw_only=True)
class ResumeOptions:
    """Options of `polaformer resume`: fields of the recipe that do not affect results; unchanged by default."""

    data: str | None = None
    """Where the data are now, if they were moved."""
    num_workers: int | None = None
    """Data workers per training process; unchanged by default."""

    def problems(self) -> list[str]:
        """All problems with the values, one line each; the recipe reports those of its own fields."""
        return []


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """Options of `polaformer eval` that every task has; a task may add some."""

    data: str | None = None
    """The data, as for train; by default those of the run."""
    split: str = "val"
    """Split of the data to evaluate on."""
    batch_size: int = 64
    """Samples per batch, in each process."""
    num_workers: int = field(default_factory=lambda: workers_for_cores(2))
    """Data workers per process; by default at most the number of cores per process."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Precision of the computation; fp16 needs a GPU."""

    def problems(self) -> list[str]:
        """All problems with the values, one line each."""
        least = {"batch_size": 1, "num_workers": 0}
        return [
            f"--{name.replace('_', '-')} is {getattr(self, name)}; give an integer ≥ {number}"
            for name, number in least.items()
            if getattr(self, name) < number
        ]


@dataclass(frozen=True, kw_only=True)
class PredictionOptions:
    """Options of `polaformer predict`; a task may add some."""

    def problems(self) -> list[str]:
        """All problems with the values, one line each."""
        return []


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Options of `polaformer check` for reading the data; a task may add some."""

    num_workers: int = 2
    """Threads that read the data."""

    def problems(self) -> list[str]:
        """All problems with the values, one line each."""
        wrong = not 1 <= self.num_workers <= 256
        return [f"--num-workers is {self.num_workers}; give an integer from 1 to 256"] * wrong


@dataclass(frozen=True)
class Answers:
    """A model's answers to the inputs of `polaformer predict`."""

    records: list[dict[str, Any]]  # for JSON, one per input
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]  # for a table
    unreadable: list[str]  # one line for every input that could not be read


@dataclass(frozen=True)
class Audit:
    """The contents of a dataset and the problems in it."""

    parts: dict[str, dict[str, Any]]  # facts about each part, by name
    problems: list[dict[str, str]]  # each with "part", the name of the sample and "text"
    digests: dict[str, str]  # of every sample, by "part/name"


@dataclass(frozen=True)
class ListedModel:
    """A model of `polaformer models`: how to build it, on any device, and the forward pass to count.

    about: further columns, by name, as in JSON. printed: the paper's parameters in millions, multiplications in billions and
    accuracy. mismatch_reason: why counting gives other numbers than those; None if it gives the same.
    """

    name: str
    build: Callable[[], Any]
    forward: Callable[[Any], object]
    about: dict[str, Any]
    printed: Any = None
    mismatch_reason: str | None = None


@dataclass(frozen=True)
class ListedModels:
    """The models of a task, with a title, and notes below the table."""

    title: str
    columns: Mapping[str, Callable[[ListedModel], str]]  # between the name and the counts
    models: list[ListedModel]
    notes: tuple[str, ...] = ()


class Task:
    """A task. Its instances have no state; the methods import whatever needs PyTorch."""

    name: ClassVar[str]
    recipe: ClassVar[type[Recipe]]
    recipes: ClassVar[tuple[Recipe, ...]] = ()  # of a task from another package; ours are in polaformer.recipes
    resumption: ClassVar[type[ResumeOptions]] = ResumeOptions
    evaluation: ClassVar[type[EvaluationOptions]] = EvaluationOptions
    prediction: ClassVar[type[PredictionOptions]] = PredictionOptions
    checking: ClassVar[type[CheckOptions]] = CheckOptions

    def predictor(self, weights: Path) -> "Predictor":
        """The trained model in a weights file, ready to answer and to be evaluated; raises DataError."""
        raise NotImplementedError(f"the task {self.name!r} does not implement predictor()")

    def reads(self, data: str) -> bool:
        """Whether the data look like data of this task; `polaformer check` asks, so the answer should be quick."""
        return False

    def check(self, data: str, options: Any, known: Mapping[str, str] | None, begin: Callable[[int], Advance]) -> Audit:
        """Reads all data and returns the problems. known: digests to compare with; calls `begin` with the number of samples."""
        raise SettingsError(f"the task {self.name!r} cannot check data")

    def models(self, pattern: str, attention: Sequence[str]) -> ListedModels:
        """The models whose names match a pattern, with their own mechanisms or, if some are given, with those."""
        raise SettingsError(f"the task {self.name!r} lists no models")
