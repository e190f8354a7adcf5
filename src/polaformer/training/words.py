"""What a task calls its things: the number that decides which weights are best, its samples. Needs no PyTorch."""

from dataclasses import dataclass
from math import isnan

VALIDATION = "val"  # the split that is evaluated while training, in every task


@dataclass(frozen=True)
class Metric:
    """A number in the record of an evaluation: what it is called there, and how it is printed."""

    name: str
    unit: str = ""
    higher_is_better: bool = True
    digits: int = 2

    @property
    def label(self) -> str:
        """What people call it."""
        return self.name.replace("_", " ")

    def is_better(self, value: float, than: float | None) -> bool:
        """Whether a value is better than another; anything is better than none, but NaN is never better."""
        if isnan(value):
            return False
        return than is None or (value > than if self.higher_is_better else value < than)

    def text(self, value: float | None) -> str:
        """A value as it is printed; None is what journals have for numbers that are not finite."""
        return "–" if value is None else f"{value:.{self.digits}f} {self.unit}".strip()


@dataclass(frozen=True)
class Words:
    """What a task calls its things, for journals, progress and messages."""

    metric: Metric
    noun: str = "samples"
    allow_option: str | None = None  # what allows more samples that cannot be read, such as "--max-bad-share"
    skip_option: str | None = None  # what makes a run go on without samples that cannot be read, such as "--on-bad-image skip"
