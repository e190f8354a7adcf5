"""A training of image classification: every number of it in one frozen dataclass, one a line."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from polaformer.extras import require
from polaformer.tasks.recipe import Recipe
from polaformer.training.metric import Metric, TaskTerms

if TYPE_CHECKING:
    from polaformer.tasks.classification.job import ClassificationJob

DIGITS = "digits"  # as data
IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


@dataclass(frozen=True, kw_only=True)
class ClassificationRecipe(Recipe):
    """Image classification. The defaults are the authors' for ImageNet-1K and Swin."""

    task: ClassVar[str] = "classification"
    terms: ClassVar[TaskTerms] = TaskTerms(Metric("accuracy", "%"), "images", "--max-bad-share", "--on-bad-image skip")

    data: str | None = None
    """A folder of class folders (or with train and val in it), a .tar or a folder of them, an .npz, hfds:FOLDER, or digits."""
    val_share: float = 0.1
    """Share of the images that is held out where the data have no validation part."""
    on_bad_image: str = "error"
    """What an image that cannot be read does: error ends the run, skip takes another one in its place."""
    max_bad_share: float = 0.001
    """Share of an epoch's images that may be skipped before the run ends; one may be in any case."""
    model: str = "pola_swin_tiny"
    """One of `polaformer models`."""
    attention: str | None = None
    """Mechanism of all stages, or one a stage with commas between them; None: the model's own."""
    attention_options: tuple[str, ...] | None = None
    """Arguments of the attention layer and its mechanism, NAME=VALUE each, such as gate=linear; None: as published."""
    img_size: int = 224
    """Height and width of training and evaluation, in pixels."""
    patch_size: int | None = None
    """Pixels of a patch; None: the model's own, as for the following."""
    dims: tuple[int, ...] | None = None
    """Channels of each stage."""
    depths: tuple[int, ...] | None = None
    """Blocks of each stage."""
    num_heads: tuple[int, ...] | None = None
    """Heads of each stage."""
    mlp_ratios: tuple[float, ...] | None = None
    """Width of the hidden layer over that of the block, of each stage."""
    reductions: tuple[int, ...] | None = None
    """Factor by which keys are fewer than queries along height and width, of each stage."""
    drop_path_rate: float | None = None
    """Largest share of residual branches that is dropped."""
    checkpoint: str | None = None
    """Weights to start from (a file, a run or a checkpoint): a classifier for other classes is left out, tables are resized."""
    resize: str = "square"
    """How evaluation shapes images: square squeezes them, as the authors do; shorter cuts them, as is usual."""
    crop_pct: float = 0.875
    """Share of the resized image that evaluation cuts out of its middle."""
    interpolation: str = "bicubic"
    """How images are resized: bicubic, bilinear, nearest, lanczos, or random (in training)."""
    mean: tuple[float, ...] = IMAGENET_MEAN
    """Mean of each channel, which is subtracted; one number makes images grey."""
    std: tuple[float, ...] = IMAGENET_STD
    """Standard deviation of each channel, which is divided by."""
    crop_scale: tuple[float, float] = (0.08, 1.0)
    """Share of an image that a random crop of training covers, from and to."""
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)
    """Width over height of a random crop, from and to."""
    hflip: float = 0.5
    """Share of training images that are mirrored."""
    auto_augment: str | None = "rand-m9-mstd0.5-inc1"
    """timm's name of an augmentation; None: colour jitter alone."""
    color_jitter: float = 0.4
    """Strength of colour jitter, where there is no auto_augment."""
    erase_prob: float = 0.25
    """Share of training images in which a random rectangle is replaced by noise."""
    mixup: float = 0.8
    """Alpha of mixup; 0: none."""
    cutmix: float = 1.0
    """Alpha of cutmix; 0: none."""
    mix_prob: float = 1.0
    """Share of batches that are mixed."""
    mix_switch_prob: float = 0.5
    """Share of mixed batches that get cutmix, where there are both."""
    smoothing: float = 0.1
    """Label smoothing."""

    @property
    def command(self) -> str:
        """What trains it: for the paper's models on one machine of eight GPUs, as the authors did."""
        if self.name.startswith("imagenet/"):
            weights = " --checkpoint WEIGHTS" if self.needs_checkpoint else ""
            return f"torchrun --nproc-per-node 8 -m polaformer train {self.name} --data IMAGENET{weights}"
        return super().command

    def problems(self) -> list[str]:
        """Everything that makes no sense, a line each; needs neither the data nor PyTorch."""
        found = super().problems()
        choices: dict[str, tuple[str, ...]] = {"on_bad_image": ("error", "skip"), "resize": ("square", "shorter")}
        choices["interpolation"] = ("bicubic", "bilinear", "nearest", "lanczos", "random")
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                found.append(f"{name} is {getattr(self, name)!r}; choose one of {', '.join(allowed)}")
        return found + self._wrong_attention_options() + self._wrong_shares() + self._wrong_sizes()

    def _wrong_attention_options(self) -> list[str]:
        pairs = self.attention_options or ()
        wrong = [pair for pair in pairs if not pair.partition("=")[0].isidentifier() or not pair.partition("=")[2]]
        names = [pair.partition("=")[0] for pair in pairs]
        twice = sorted({name for name in names if names.count(name) > 1})
        found = [f"attention_options holds {pair!r}; give NAME=VALUE, such as gate=linear" for pair in wrong]
        return found + [f"attention_options gives {name} twice; give it once" for name in twice]

    def _wrong_shares(self) -> list[str]:
        shares = ("max_bad_share", "hflip", "erase_prob", "mix_prob", "mix_switch_prob")
        found = [f"{n} is {getattr(self, n)}; give a share from 0 to 1" for n in shares if not 0 <= getattr(self, n) <= 1]
        below = {"val_share": self.val_share, "smoothing": self.smoothing, "drop_path_rate": self.drop_path_rate or 0.0}
        found += [f"{n} is {v}; give at least 0 and below 1" for n, v in below.items() if not 0 <= v < 1]
        at_least = {"mixup": self.mixup, "cutmix": self.cutmix, "color_jitter": self.color_jitter}
        found += [f"{n} is {v}; give a number of at least 0" for n, v in at_least.items() if not 0 <= v < float("inf")]
        if not 0 < self.crop_pct <= 1:
            found.append(f"crop_pct is {self.crop_pct}; give a share above 0, up to 1")
        for name, most in (("crop_scale", 1.0), ("crop_ratio", float("inf"))):
            low, high = getattr(self, name)
            if not 0 < low <= high <= most:
                found.append(f"{name} is {low:g} to {high:g}; give two numbers above 0, the smaller one first")
        return found

    def _wrong_sizes(self) -> list[str]:
        found = []
        for name in ("img_size", "patch_size"):
            value = getattr(self, name)
            if value is not None and value < 1:
                found.append(f"{name} is {value}; give a whole number of pixels")
        for name in ("dims", "depths", "num_heads", "mlp_ratios", "reductions"):
            values = getattr(self, name)
            if values is not None and (not values or any(not 0 < value < float("inf") for value in values)):
                found.append(f"{name} is {values}; give positive numbers, one a stage")
        if len(self.mean) not in (1, 3) or len(self.std) != len(self.mean) or not all(s > 0 for s in self.std):
            found.append(f"mean is {self.mean} and std {self.std}; give three numbers each, or one each, and std above 0")
        part = self.batch_size // max(self.accumulation, 1)
        if (self.mixup > 0 or self.cutmix > 0) and part % 2:
            found.append(f"mixing needs an even number of images, not {part}; change batch_size, or set mixup and cutmix to 0")
        return found

    def model_options(self) -> dict[str, Any]:
        """The arguments of `create_model` besides the name and the number of classes."""
        names = ("attention", "patch_size", "dims", "depths", "num_heads", "mlp_ratios", "reductions", "drop_path_rate")
        given = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.attention_options is not None:
            pairs = (pair.partition("=") for pair in self.attention_options)
            given["attention_options"] = {name: _plain_value(word) for name, _, word in pairs}
        return given | {"img_size": self.img_size, "in_chans": len(self.mean)}

    def before_training(self) -> list[str]:
        """Without data, the digits that scikit-learn brings are trained on."""
        if self.data in (None, DIGITS):
            require("train", "sklearn")
        return ["no --data given: the 1,797 bundled handwritten digits are trained on"] * (self.data is None)

    def job(self) -> "ClassificationJob":
        """The data, model and task; loads PyTorch, opens the data, and raises SettingsError or DataError."""
        from polaformer.tasks.classification.job import ClassificationJob

        return ClassificationJob(self)


def _plain_value(word: str) -> bool | int | float | str | None:
    """None, True, False or a number where the word is one, otherwise the word."""
    if word.lower() in ("none", "true", "false"):
        return {"none": None, "true": True, "false": False}[word.lower()]
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word
