"""The settings of a segmenter's inference. Needs no PyTorch."""

from dataclasses import dataclass
from math import isfinite
from typing import Literal

from polaformer.errors import SettingsError

Mode = Literal["whole", "slide"]
MODES: tuple[Mode, ...] = ("whole", "slide")


@dataclass(frozen=True, kw_only=True)
class Inference:
    """How an image is segmented; raises SettingsError. The defaults of windows are those of mmsegmentation for ADE20K."""

    mode: Mode = "whole"
    """whole: the image at once; slide: overlapping windows, whose logits are averaged."""
    window: int = 512
    """Side of the windows in pixels; smaller images are one window."""
    stride: int = 341
    """Distance between neighbouring windows in pixels."""
    scales: tuple[float, ...] = (1.0,)
    """Scales of the image, over which probabilities are averaged."""
    flip: bool = False
    """Average over the image and its mirror image too."""

    def __post_init__(self) -> None:
        if problems := inference_problems(self.mode, self.window, self.stride, self.scales):
            raise SettingsError(problems)

    @property
    def is_single(self) -> bool:
        """Whether there is nothing to average over scales and flips."""
        return len(self.scales) == 1 and not self.flip


def inference_problems(mode: str, window: int, stride: int, scales: tuple[float, ...] = (1.0,)) -> list[str]:
    """All problems with the values, one line each."""
    found = [] if mode in MODES else [f"mode is {mode!r}; choose one of {', '.join(MODES)}"]
    found += [
        f"{name} is {value!r}; give an integer ≥ 1" for name, value in (("window", window), ("stride", stride)) if value < 1
    ]
    if stride > window:
        found.append(
            f"stride is {stride}, but window is {window}, so that some pixels are in no window; give a stride ≤ window"
        )
    if not scales or any(not (isfinite(scale) and scale > 0) for scale in scales):
        found.append(f"scales is {scales!r}; give numbers > 0")
    return found
