"""`polaformer data pathfinder`: generate Pathfinder."""

from dataclasses import dataclass

from polaformer.cli.data_generation import Generation, stages
from polaformer.cli.errors import UsageError
from polaformer.cli.output import load

MIN_IMAGES = 10  # one for each of val and test


@dataclass(frozen=True)
class DataPathfinder(Generation):
    """Generate Pathfinder of the Long Range Arena (are two markers connected by a dashed contour?).

    Writes curv_contour_length_L/imgs and curv_contour_length_L/metadata in the format of the release, and manifest.json.

    Example: polaformer data pathfinder --out lra/pathfinder

    Example: polaformer data pathfinder lra_release/pathfinder32 --out lra/pathfinder

    Example: polaformer data pathfinder --out easy --images 20000 --contour-length 6
    """

    dataset = "pathfinder"

    images: int = 200_000
    """Number of images: 80 % for training, 10 % for validation and 10 % for testing."""
    contour_length: int = 14
    """Number of segments of the two long contours; 14 is the level of the published tables, 9 and 6 are easier."""

    def generate(self) -> int:
        """Generates what is missing, and prints statistics of each split."""
        load("polaformer.data.sources.lra.pathfinder_generator")
        from polaformer.data.sources.lra.pathfinder_generator import CONTOUR_LENGTHS, generate

        if self.contour_length not in CONTOUR_LENGTHS:
            first, last = CONTOUR_LENGTHS[0], CONTOUR_LENGTHS[-1]
            raise UsageError(f"--contour-length is {self.contour_length}; give an integer from {first} to {last}")
        self.prepare({"images": self.images}, least=MIN_IMAGES)
        with stages("images") as stage:
            manifest = generate(
                self.out,
                self.images,
                self.contour_length,
                self.seed,
                num_workers=self.workers,
                overwrite=self.overwrite,
                stage=stage,
            )
        return self.report(manifest)
