"""`polaformer data listops`: generate ListOps."""

from dataclasses import dataclass

from polaformer.cli.data_generation import Generation, stages
from polaformer.cli.output import load


@dataclass(frozen=True)
class DataListops(Generation):
    """Generate ListOps of the Long Range Arena (nested operations on lists of digits).

    Writes basic_train.tsv, basic_val.tsv and basic_test.tsv in the format of the release, and manifest.json. All expressions
    are different. With the same seed, val and test do not depend on the number of rows of train.

    Example: polaformer data listops --out lra/listops

    Example: polaformer data listops lra_release/listops-1000 --out lra/listops

    Example: polaformer data listops --out lra/listops --train 20000 --seed 1
    """

    dataset = "listops"

    train: int = 96_000
    """Number of training expressions."""
    val: int = 2_000
    """Number of validation expressions."""
    test: int = 2_000
    """Number of test expressions."""

    def generate(self) -> int:
        """Generates what is missing, and prints statistics of each split."""
        sizes = {"train": self.train, "val": self.val, "test": self.test}
        self.prepare(sizes, least=1)
        load("polaformer.data.sources.lra.listops_generator")
        from polaformer.data.sources.lra.listops_generator import generate

        with stages("rows") as stage:
            manifest = generate(self.out, sizes, self.seed, num_workers=self.workers, overwrite=self.overwrite, stage=stage)
        return self.report(manifest)
