"""What tasks on images share: the options of `eval` and `check`, and how data are checked. Needs no PyTorch."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from polaformer.tasks.image_recipe import ImageResume
from polaformer.tasks.task import Advance, Audit, CheckOptions, EvaluationOptions, Task


def val_share_problems(share: float) -> list[str]:
    """The problem with a --val-share, if any."""
    return [f"--val-share is {share}; give a number in [0, 1)"] * (not 0 <= share < 1)


def size_problems(size: int | None) -> list[str]:
    """The problem with a --size, if any."""
    return [f"--size is {size}; give an integer ≥ 1"] * (size is not None and size < 1)


def directory_problems(option: str, path: Path | None) -> list[str]:
    """The problem with a directory to write to, if any; it need not exist."""
    wrong = path is not None and path.exists() and not path.is_dir()
    return [f"{option} is {path}, which is not a directory; give another name"] * wrong


@dataclass(frozen=True, kw_only=True)
class ImageEvaluation(EvaluationOptions):
    """How to evaluate on images."""

    on_bad_image: Literal["error", "skip"] = "error"
    """What to do with an unreadable image: error ends the evaluation, skip leaves it out, counts and lists it."""
    val_share: float = 0.1
    """Share of the images to hold out if the data have no validation split; give the value used in training."""

    def problems(self) -> list[str]:
        """All problems with the values, one line each."""
        return super().problems() + val_share_problems(self.val_share)


@dataclass(frozen=True, kw_only=True)
class ImageCheck(CheckOptions):
    """How to read a dataset of images."""

    val_share: float = 0.1
    """Share of the images to hold out if the data have no validation split; give the value used in training."""

    def problems(self) -> list[str]:
        """All problems with the values, one line each."""
        return super().problems() + val_share_problems(self.val_share)


class ImageTask(Task):
    """A task on images: it opens its data for `check`, and names the function that audits them."""

    resumption = ImageResume
    checking = ImageCheck

    def audited(self, data: str, options: Any) -> tuple[Any, Callable[..., Any]]:
        """The splits of the data, and the function that audits them as `polaformer.data.audit.audit` does; raises DataError."""
        raise NotImplementedError(f"the task {self.name!r} does not implement audited()")

    def check(self, data: str, options: Any, known: Mapping[str, str] | None, begin: Callable[[int], Advance]) -> Audit:
        """Reads all images of all splits, with what is known about them."""
        found, audit = self.audited(data, options)
        advance = begin(sum(len(source) for source in found.different.values()))
        report = audit(found, known, num_workers=options.num_workers, advance=advance)
        return Audit(report.parts, [problem._asdict() for problem in report.problems], report.digests)
