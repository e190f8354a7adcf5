"""What a task is to the commands: a subclass of Task, found in the registry. Needs no PyTorch until a method is called."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from polaformer.errors import SettingsError
from polaformer.tasks.recipe import Recipe
from polaformer.training.settings import workers_for_cores

if TYPE_CHECKING:
    from polaformer.tasks.job import Predictor

Advance = Callable[[], object]  # counts one sample for a progress bar


@dataclass(frozen=True, kw_only=True)
class ResumeOptions:
    """Options of `polaformer resume`: fields of the recipe on which no result depends; as before unless given."""

    data: str | None = None
    """Where the data lie now, if they were moved."""
    num_workers: int | None = None
    """Processes that read data; as before unless given."""

    def problems(self) -> list[str]:
        """Everything that makes no sense, a line each; the recipe says what is wrong with its fields."""
        return []


@dataclass(frozen=True, kw_only=True)
class EvaluationOptions:
    """Options of `polaformer eval` that every task has; a task may add some."""

    data: str | None = None
    """The data, as for train; those of the run unless given."""
    split: str = "val"
    """Which part of the data."""
    batch_size: int = 64
    """Samples at once, in each process."""
    num_workers: int = field(default_factory=lambda: workers_for_cores(2))
    """Data workers per process; by default no more than the cores per process."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Of the computation; fp16 on GPUs."""

    def problems(self) -> list[str]:
        """Everything that makes no sense, a line each."""
        least = {"batch_size": 1, "num_workers": 0}
        return [
            f"--{name.replace('_', '-')} is {getattr(self, name)}; give a whole number of at least {number}"
            for name, number in least.items()
            if getattr(self, name) < number
        ]


@dataclass(frozen=True, kw_only=True)
class PredictionOptions:
    """Options of `polaformer predict`; a task may add some."""

    def problems(self) -> list[str]:
        """Everything that makes no sense, a line each."""
        return []


@dataclass(frozen=True, kw_only=True)
class CheckOptions:
    """Options of `polaformer check` that a task reads its data with; a task may add some."""

    num_workers: int = 2
    """Threads that read."""

    def problems(self) -> list[str]:
        """Everything that makes no sense, a line each."""
        wrong = not 1 <= self.num_workers <= 256
        return [f"--num-workers is {self.num_workers}; give a whole number from 1 to 256"] * wrong


@dataclass(frozen=True)
class Answers:
    """What a model says of the inputs of `polaformer predict`."""

    records: list[dict[str, Any]]  # for JSON, one per input
    columns: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]  # for a table
    unreadable: list[str]  # a line for every input that could not be used


@dataclass(frozen=True)
class Audit:
    """What is wrong with a data set, and what is in it."""

    parts: dict[str, dict[str, Any]]  # facts of each part, by name
    problems: list[dict[str, str]]  # each with "part", the name of the sample and "text"
    digests: dict[str, str]  # of every sample, by "part/name"


@dataclass(frozen=True)
class ListedModel:
    """A model of `polaformer models`: how it is built, on any device, and the forward pass that is counted.

    about: other columns, by name, as JSON has them. printed: the paper's millions of parameters, billions of multiplications
    and accuracy, and why counting does not give them, where it does not.
    """

    name: str
    build: Callable[[], Any]
    forward: Callable[[Any], object]
    about: dict[str, Any]
    printed: Any = None
    why_not: str | None = None


@dataclass(frozen=True)
class ListedModels:
    """The models of a task, under a title, with notes below the table."""

    title: str
    columns: Mapping[str, Callable[[ListedModel], str]]  # between the name and the counts
    models: list[ListedModel]
    notes: tuple[str, ...] = ()


class Task:
    """A task. Its instances have no state; whatever needs PyTorch is imported inside the methods."""

    name: ClassVar[str]
    recipe: ClassVar[type[Recipe]]
    recipes: ClassVar[tuple[Recipe, ...]] = ()  # those that come with a task from outside; ours stand in polaformer.recipes
    resumption: ClassVar[type[ResumeOptions]] = ResumeOptions
    evaluation: ClassVar[type[EvaluationOptions]] = EvaluationOptions
    prediction: ClassVar[type[PredictionOptions]] = PredictionOptions
    checking: ClassVar[type[CheckOptions]] = CheckOptions

    def predictor(self, weights: Path) -> "Predictor":
        """The trained model in a weights file, ready to answer and to be evaluated; raises DataError."""
        raise NotImplementedError(f"the task {self.name!r} does not say how to load a predictor")

    def reads(self, data: str) -> bool:
        """Whether the data look like this task's; asked by `polaformer check`, and answered without reading much."""
        return False

    def check(self, data: str, options: Any, known: Mapping[str, str] | None, begin: Callable[[int], Advance]) -> Audit:
        """Reads all of the data and says what is wrong. known: digests to compare with; `begin` is told how many samples."""
        raise SettingsError(f"the task {self.name!r} has no check of data")

    def models(self, pattern: str, attention: Sequence[str]) -> ListedModels:
        """The models whose names match a pattern, with other mechanisms in the place of their own where some are given."""
        raise SettingsError(f"the task {self.name!r} lists no models")
