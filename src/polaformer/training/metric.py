"""The metric that decides which weights are best, and the terms a task uses in messages. Needs no PyTorch."""

from dataclasses import dataclass
from math import isnan

VALIDATION = "val"  # the split that every task evaluates during training


@dataclass(frozen=True)
class Metric:
    """A number in the record of an evaluation: its key there, and how it is printed."""

    name: str
    unit: str = ""
    higher_is_better: bool = True
    digits: int = 2

    @property
    def label(self) -> str:
        """The name as it is printed."""
        return self.name.replace("_", " ")

    def is_better(self, value: float, than: float | None) -> bool:
        """Whether `value` is better than `than`; any number is better than None, and NaN is never better."""
        if isnan(value):
            return False
        return than is None or (value > than if self.higher_is_better else value < than)

    def text(self, value: float | None) -> str:
        """A value as it is printed; journals store numbers that are not finite as None."""
        return "–" if value is None else f"{value:.{self.digits}f} {self.unit}".strip()


@dataclass(frozen=True)
class TaskTerms:
    """The terms a task uses in journals, progress bars and messages."""

    metric: Metric
    sample_noun: str = "samples"  # plural
    allow_option: str | None = None  # the option that allows more unreadable samples, such as "--max-bad-share"
    skip_option: str | None = None  # the option that skips unreadable samples, such as "--on-bad-image skip"
