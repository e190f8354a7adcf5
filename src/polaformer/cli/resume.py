"""`polaformer resume`: a run goes on from its newest valid checkpoint."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from polaformer.cli.errors import DIVERGED
from polaformer.cli.output import load, new_table, print_all, print_json
from polaformer.cli.training_view import TrainingView
from polaformer.errors import DataError
from polaformer.extras import require


@dataclass(frozen=True)
class Resume:
    """Go on with a run that was stopped or killed, to the same last bit as if it had not been.

    Takes the newest checkpoint that is whole; damaged ones are named and passed over. A finished run is evaluated again.

    Example: polaformer resume runs/digits/pola-vit-tiny/20261116-120000-0
    """

    folder: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="RUN")]]
    """Folder of the run."""
    data: Annotated[str | None, tyro.conf.arg(metavar="DATA")] = None
    """Where the data lie now, if they were moved."""
    num_workers: Annotated[int | None, tyro.conf.arg(metavar="N")] = None
    """Processes that read data; as before unless given."""
    on_bad_image: Literal["error", "skip"] | None = None
    """What an image that cannot be read does from now on; as before unless given."""
    max_bad_share: Annotated[float | None, tyro.conf.arg(metavar="SHARE")] = None
    """Share of an epoch's images that may be skipped; as before unless given."""
    replay: bool = False
    """Do not train: run the batch again at which the loss was not finite, and say what it does."""
    json: bool = False
    """Print the result as JSON on stdout and nothing else there."""

    def run(self) -> int:
        """Trains on to the end."""
        from polaformer.cli.run_report import report

        require("train", "accelerate", "tensorboard", "matplotlib")
        load("polaformer.recipes.running")
        from polaformer.recipes.running import recipe_of, resume

        _, recipe = recipe_of(self.folder)
        names = ("data", "num_workers", "on_bad_image", "max_bad_share")
        changes = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if self.replay:
            return self._replay(changes)
        with TrainingView(recipe.name, recipe.batch_size, recipe.num_epochs) as view:
            finished = resume(self.folder, view, changes)
        report(finished, finished.job.recipe, command="resume", json=self.json)
        return 0

    def _replay(self, changes: dict[str, Any]) -> int:
        from polaformer.recipes.running import replay

        found = replay(self.folder, changes)
        if not found:
            raise DataError(f"{self.folder} has no batch of a diverged step; there is nothing to replay")
        records: list[dict[str, Any]] = []
        for path, one in found.items():
            records.append({"file": str(path), "loss": one.loss, "grad_norm": one.grad_norm, "not_finite": one.bad_parameters})
        if self.json:
            print_json({"command": "resume", "replay": records})
        else:
            table = new_table("The step that diverged, once more", "batch", "loss", "norm of gradient", "gradients not finite")
            for record in records:
                bad = record["not_finite"]
                some = ", ".join(bad[:3]) + (f" and {len(bad) - 3} more" if len(bad) > 3 else "")
                table.add_row(Path(record["file"]).name, f"{record['loss']:g}", f"{record['grad_norm']:g}", some or "none")
            print_all(table)
        return DIVERGED if any(one.bad_parameters for one in found.values()) else 0
