"""The recipe of image classification: every hyperparameter of a training run in one frozen dataclass."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from polaformer.extras import require
from polaformer.tasks.image_recipe import IMAGENET_MEAN, IMAGENET_STD, ImageRecipe, normalisation_problems
from polaformer.training.metric import Metric, TaskTerms

if TYPE_CHECKING:
    from polaformer.tasks.classification.job import ClassificationJob

DIGITS = "digits"  # the name of the bundled data


@dataclass(frozen=True, kw_only=True)
class ClassificationRecipe(ImageRecipe):
    """Image classification. The defaults are the authors' settings for Swin on ImageNet-1K."""

    task: ClassVar[str] = "classification"
    terms: ClassVar[TaskTerms] = TaskTerms(Metric("accuracy", "%"), "images", "--max-bad-share", "--on-bad-image skip")

    data: str | None = None
    """A folder of class folders (or of train and val), a .tar or a folder of them, an .npz, hfds:FOLDER, or digits."""
    val_share: float = 0.1
    """Share of the images to hold out if the data have no validation split."""
    img_size: int = 224
    """Height and width of the images in training and evaluation, in pixels."""
    checkpoint: str | None = None
    """Weights to start from (file, run or checkpoint); a head for other classes is dropped, position tables are resized."""
    resize: str = "square"
    """How evaluation resizes images: square squashes them, as the authors do; shorter crops them, as is usual."""
    crop_pct: float = 0.875
    """Share of the resized image that the centre crop of evaluation keeps."""
    interpolation: str = "bicubic"
    """How to resize images: bicubic, bilinear, nearest, lanczos, or random (training only)."""
    mean: tuple[float, ...] = IMAGENET_MEAN
    """Mean of each channel, for normalisation; one number: greyscale images."""
    std: tuple[float, ...] = IMAGENET_STD
    """Standard deviation of each channel, for normalisation."""
    crop_scale: tuple[float, float] = (0.08, 1.0)
    """Smallest and largest share of an image that a random crop of training covers."""
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Smallest and largest aspect ratio (width / height) of a random crop."""
    hflip: float = 0.5
    """Probability of flipping a training image horizontally."""
    auto_augment: str | None = "rand-m9-mstd0.5-inc1"
    """Augmentation policy, in timm's notation; None: colour jitter only."""
    color_jitter: float = 0.4
    """Strength of colour jitter, if auto_augment is None."""
    erase_prob: float = 0.25
    """Probability of replacing a random rectangle of a training image by noise (random erasing)."""
    mixup: float = 0.8
    """Alpha of mixup; 0: no mixup."""
    cutmix: float = 1.0
    """Alpha of cutmix; 0: no cutmix."""
    mix_prob: float = 1.0
    """Probability of applying mixup or cutmix to a batch."""
    mix_switch_prob: float = 0.5
    """Probability of cutmix instead of mixup, if both are on."""
    smoothing: float = 0.1
    """Label smoothing."""

    @property
    def command(self) -> str:
        """The command that trains it; for the paper's models on one machine with eight GPUs, as the authors did."""
        if self.name.startswith("imagenet/"):
            weights = " --checkpoint WEIGHTS" if self.needs_checkpoint else ""
            return f"torchrun --nproc-per-node 8 -m polaformer train {self.name} --data IMAGENET{weights}"
        return super().command

    def problems(self) -> list[str]:
        """All problems with the values, one line each; needs neither the data nor PyTorch."""
        found = super().problems()
        choices: dict[str, tuple[str, ...]] = {"resize": ("square", "shorter")}
        choices["interpolation"] = ("bicubic", "bilinear", "nearest", "lanczos", "random")
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                found.append(f"{name} is {getattr(self, name)!r}; choose one of {', '.join(allowed)}")
        return found + self._range_problems() + self._size_problems()

    def _range_problems(self) -> list[str]:
        shares = ("hflip", "erase_prob", "mix_prob", "mix_switch_prob")
        found = [f"{n} is {getattr(self, n)}; give a number in [0, 1]" for n in shares if not 0 <= getattr(self, n) <= 1]
        below = {"val_share": self.val_share, "smoothing": self.smoothing}
        found += [f"{n} is {v}; give a number in [0, 1)" for n, v in below.items() if not 0 <= v < 1]
        at_least = {"mixup": self.mixup, "cutmix": self.cutmix, "color_jitter": self.color_jitter}
        found += [f"{n} is {v}; give a number ≥ 0" for n, v in at_least.items() if not 0 <= v < float("inf")]
        if not 0 < self.crop_pct <= 1:
            found.append(f"crop_pct is {self.crop_pct}; give a number in (0, 1]")
        for name, most in (("crop_scale", 1.0), ("crop_ratio", float("inf"))):
            low, high = getattr(self, name)
            if not 0 < low <= high <= most:
                found.append(f"{name} is {low:g} to {high:g}; give two positive numbers, the smaller one first")
        return found

    def _size_problems(self) -> list[str]:
        found = [f"img_size is {self.img_size}; give an integer ≥ 1"] * (self.img_size < 1)
        found += normalisation_problems(self.mean, self.std, or_one=True)
        part = self.batch_size // max(self.accumulation, 1)
        if (self.mixup > 0 or self.cutmix > 0) and part % 2:
            found.append(f"mixup and cutmix need an even number of images, not {part}; change batch_size, or set both to 0")
        return found

    def model_options(self) -> dict[str, Any]:
        """The arguments of `create_model`, without the name and the number of classes."""
        return self.backbone_options() | {"img_size": self.img_size, "in_chans": len(self.mean)}

    def before_training(self) -> list[str]:
        """Announces that without data, the digits bundled with scikit-learn are used."""
        if self.data in (None, DIGITS):
            require("train", "sklearn")
        return ["no --data given: training on the 1,797 bundled handwritten digits"] * (self.data is None)

    def job(self) -> "ClassificationJob":
        """Opens the data and builds the model; loads PyTorch, raises SettingsError or DataError."""
        from polaformer.tasks.classification.job import ClassificationJob

        return ClassificationJob(self)
