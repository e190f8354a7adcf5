"""`polaformer predict`: what a trained model sees in images."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from polaformer.cli.errors import UsageError
from polaformer.cli.output import load, new_table, print_all, print_json, print_line, progress_bar
from polaformer.errors import DataError, shown

if TYPE_CHECKING:
    from polaformer.tasks.classifier import Classifier, Guess

AT_ONCE = 32


@dataclass(frozen=True)
class Predict:
    """Say what is in images: the most probable classes of each.

    An image that cannot be read is named at the end, and makes the exit code 65; the others are predicted all the same.

    Example: polaformer predict cat.jpg dog.png --checkpoint runs/digits/pola-vit-tiny/20261116-120000-0 --top 3
    """

    images: tyro.conf.Positional[Annotated[tuple[Path, ...], tyro.conf.arg(metavar="IMAGE")]]
    """Files of images."""
    checkpoint: Annotated[Path, tyro.conf.arg(metavar="PATH")]
    """A run, a checkpoint of one, or a file of weights."""
    top: int = 5
    """How many classes to name."""
    json: bool = False
    """Print the result as JSON on stdout and nothing else there."""

    def run(self) -> int:
        """Loads, predicts, prints."""
        self._check()
        load("polaformer.tasks.classifier", "polaformer.training.run")
        from polaformer.tasks.classifier import load_classifier
        from polaformer.training.run import weights_of

        classifier = load_classifier(weights_of(self.checkpoint))
        found, unreadable = self._predict(classifier)
        if self.json:
            images = [{"image": name, "classes": [guess._asdict() for guess in guesses]} for name, guesses in found.items()]
            print_json({"command": "predict", "checkpoint": str(self.checkpoint), "images": images, "unreadable": unreadable})
        else:
            self._show(found)
            for line in unreadable:
                print_line(f"polaformer predict: {line}", stderr=True)
        return 65 if unreadable else 0

    def _check(self) -> None:
        if not self.images:
            raise UsageError("no images given; name one or more files, as in: polaformer predict cat.jpg --checkpoint RUN")
        if self.top < 1:
            raise UsageError(f"--top is {self.top}; give a whole number of at least 1")
        if not os.path.exists(self.checkpoint):
            raise UsageError(f"there is no {self.checkpoint}; give a run, a checkpoint of one, or a file of weights")

    def _predict(self, classifier: "Classifier") -> "tuple[dict[str, list[Guess]], list[str]]":
        from polaformer.data.images import read_image

        found: dict[str, list[Guess]] = {}
        unreadable = []
        with progress_bar() as bar:
            task = bar.add_task("predicting", total=len(self.images))
            for start in range(0, len(self.images), AT_ONCE):
                images = {}
                for path in self.images[start : start + AT_ONCE]:
                    try:
                        images[shown(path)] = read_image(path, channels=classifier.preprocessing.channels)
                    except DataError as error:
                        unreadable.append(str(error))
                if images:
                    guesses = classifier.predict(list(images.values()), self.top)
                    found |= dict(zip(images, guesses, strict=True))
                bar.advance(task, AT_ONCE)
        return found, unreadable

    def _show(self, found: "dict[str, list[Guess]]") -> None:
        table = new_table(f"{self.checkpoint}", "image", "class", "probability")
        for name, guesses in found.items():
            for place, guess in enumerate(guesses):
                table.add_row(name if place == 0 else "", guess.name, f"{100 * guess.probability:.1f} %")
        if found:
            print_all(table)
