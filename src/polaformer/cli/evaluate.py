"""`polaformer eval`: what a model gets right of a data set, counted exactly whatever the number of processes."""

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from polaformer.cli.errors import UsageError
from polaformer.cli.output import load, new_table, print_all, print_json, progress_bar
from polaformer.errors import shown
from polaformer.extras import require
from polaformer.training.settings import workers_for_cores

if TYPE_CHECKING:
    from polaformer.data.sources import Source
    from polaformer.data.transforms import Preprocessing
    from polaformer.tasks.classification import Counts
    from polaformer.tasks.classifier import Classifier


@dataclass(frozen=True)
class Evaluate:
    """Evaluate a model on the validation images of a data set.

    With several processes each image is still counted once. How images are prepared is what the file of weights says: for the
    authors' files their way, which squeezes an image to a square; --resize shorter is the usual way, which cuts it.

    Example: polaformer eval --checkpoint runs/digits/pola-vit-tiny/20261116-120000-0

    Example: polaformer eval --checkpoint pola_swin_tiny.safetensors --data imagenet --resize shorter

    Example: torchrun --nproc-per-node 4 -m polaformer eval --checkpoint pola_swin_tiny.safetensors --data imagenet
    """

    checkpoint: Annotated[Path, tyro.conf.arg(metavar="PATH")]
    """A run, a checkpoint of one, or a file of weights."""
    data: Annotated[str | None, tyro.conf.arg(metavar="DATA")] = None
    """The data, as for train; those of the run unless given."""
    split: Literal["val", "train"] = "val"
    """Which part of the data."""
    resize: Literal["square", "shorter"] | None = None
    """How images become squares: squeezed (the authors'), or cut after the shorter side was resized (the usual); as trained
    unless given."""
    img_size: Annotated[int | None, tyro.conf.arg(metavar="PIXELS")] = None
    """Height and width of what the model sees; as trained unless given."""
    crop_pct: Annotated[float | None, tyro.conf.arg(metavar="SHARE")] = None
    """Share of the resized image that is cut out of its middle; as trained unless given."""
    batch_size: int = 64
    """Images at once, in each process."""
    num_workers: int = field(default_factory=lambda: workers_for_cores(2))
    """Data workers per process; by default no more than the cores per process."""
    precision: Literal["fp32", "bf16", "fp16"] = "fp32"
    """Of the computation; fp16 on GPUs."""
    on_bad_image: Literal["error", "skip"] = "error"
    """What an image that cannot be read does: error ends the evaluation, skip leaves it out, counts and lists it."""
    val_share: float = 0.1
    """Share that is held out where the data have no validation part; as in training."""
    json: bool = False
    """Print the result as JSON on stdout and nothing else there."""

    def run(self) -> int:
        """Loads, counts, prints."""
        self._check()
        require("train", "accelerate")
        load("polaformer.recipes.running")
        from polaformer.tasks.classifier import load_classifier
        from polaformer.training.processes import start
        from polaformer.training.run import weights_of

        weights = weights_of(self.checkpoint)
        source = self._source()
        classifier = load_classifier(weights)
        self._check_classes(classifier, source)
        preprocessing = self._preprocessing(classifier.preprocessing)
        counts = self._count(classifier, source, preprocessing)
        if start(self.precision).is_main_process:
            self._report(counts, weights, preprocessing)
        return 0

    def _check(self) -> None:
        problems = []
        if not os.path.exists(self.checkpoint):
            problems.append(f"there is no {self.checkpoint}; give a run, a checkpoint of one, or a file of weights")
        for name, least in (("batch_size", 1), ("num_workers", 0), ("img_size", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                problems.append(f"--{name.replace('_', '-')} is {value}; give a whole number of at least {least}")
        if self.crop_pct is not None and not 0 < self.crop_pct <= 1:
            problems.append(f"--crop-pct is {self.crop_pct}; give a share above 0, up to 1")
        if not 0 <= self.val_share < 1:
            problems.append(f"--val-share is {self.val_share}; give at least 0 and below 1")
        if problems:
            raise UsageError("; ".join(problems))

    def _source(self) -> "Source":
        from polaformer.data.sources import DIGITS, open_data
        from polaformer.recipes.running import recipe_of
        from polaformer.training.run import CONFIG

        data, share = self.data, self.val_share
        if data is None:
            runs = [
                folder for folder in (self.checkpoint, *self.checkpoint.resolve().parents[:2]) if (folder / CONFIG).is_file()
            ]
            if not runs:
                raise UsageError(f"{self.checkpoint} belongs to no run, so its data are not known; give them with --data")
            recipe = recipe_of(runs[0])[1]
            data, share = DIGITS if recipe.data is None else recipe.data, recipe.val_share
        found = open_data(data, val_share=share)
        return found.val if self.split == "val" else found.train

    def _check_classes(self, classifier: "Classifier", source: "Source") -> None:
        named = classifier.classes != tuple(str(label) for label in range(len(classifier.classes)))
        if len(source.classes) != len(classifier.classes) or (named and source.classes != classifier.classes):
            raise UsageError(
                f"the data have the {len(source.classes)} classes {_some(source.classes)}, the model has the "
                f"{len(classifier.classes)} classes {_some(classifier.classes)}; give the data that it was trained for"
            )

    def _preprocessing(self, stored: "Preprocessing") -> "Preprocessing":
        found = stored if self.resize is None else replace(stored, resize=self.resize)
        found = found if self.img_size is None else replace(found, img_size=(self.img_size, self.img_size))
        return found if self.crop_pct is None else replace(found, crop_pct=self.crop_pct)

    def _count(self, classifier: "Classifier", source: "Source", preprocessing: "Preprocessing") -> "Counts":
        from polaformer.data.order import Share
        from polaformer.data.samples import Samples, batches
        from polaformer.tasks.classification import Classification
        from polaformer.training.evaluation import count
        from polaformer.training.processes import start

        accelerator = start(self.precision)
        share = Share(len(source), self.batch_size, accelerator.process_index, accelerator.num_processes)
        samples = Samples(
            source,
            preprocessing.transform(),
            channels=preprocessing.channels,
            seed=0,
            on_bad_image=self.on_bad_image,
            replace=False,
        )
        with progress_bar() as bar:
            task = bar.add_task(f"evaluating {len(source):,} images", total=len(share))
            read = batches(samples, share, num_workers=self.num_workers)
            shown = (bar.advance(task) or batch for batch in read)  # type: ignore[func-returns-value]
            model = classifier.model.to(accelerator.device)
            return count(model, Classification(len(classifier.classes)), shown, accelerator)

    def _report(self, counts: "Counts", weights: Path, preprocessing: "Preprocessing") -> None:
        record = counts.record()
        about: dict[str, Any] = {"checkpoint": str(weights), "resize": preprocessing.resize, "img_size": preprocessing.img_size}
        about |= {"crop_pct": preprocessing.crop_pct, "unreadable": len(counts.bad)}
        if self.json:
            print_json({"command": "eval", **about, "result": record, "unreadable_images": counts.bad})
            return
        table = new_table(f"{weights} on {record['samples']:,} images", "", "")
        table.add_row("accuracy", f"{record['accuracy']:.3f} %")
        table.add_row("correct", f"{record['correct']:,}")
        table.add_row("top-5 accuracy", f"{record['top5_accuracy']:.3f} %")
        table.add_row("loss", f"{record['loss']:.5f}")
        table.add_row("images resized to", f"{preprocessing.resize}, {preprocessing.img_size}, crop {preprocessing.crop_pct:g}")
        table.add_row("unreadable, left out", f"{len(counts.bad)}")
        print_all(table, *counts.bad)


def _some(names: tuple[str, ...]) -> str:
    return ", ".join(shown(name) for name in names[:3]) + (", …" if len(names) > 3 else "")
