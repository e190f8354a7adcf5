"""`polaformer demo`: train a small PolaFormer and its softmax twin on handwritten digits, in about two minutes."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polaformer.cli.errors import UsageError
from polaformer.cli.output import load, machine_lines, new_table, prepare_folder, print_all, print_json, to_json
from polaformer.cli.training_view import TrainingView
from polaformer.extras import require
from polaformer.recipes.digits import POLA_VIT_TINY
from polaformer.regular_files import writing

if TYPE_CHECKING:
    from polaformer.analysis.report import RunResult

TWINS = {"PolaFormer": "pola", "softmax twin": "softmax"}
LEAD = (
    "Two small vision transformers that differ only in their attention layers (PolaFormer's also has a gate and a depthwise "
    "convolution), trained in the same way on the same 1,437 handwritten digits of 8×8 pixels and tested on 360 others. Each "
    "digit is split into 16 patches."
)


@dataclass(frozen=True)
class Demo:
    """Train a small PolaFormer and its softmax twin on handwritten digits, and compare them.

    Takes about two minutes on two cores. Prints a table and writes report.html with learning curves, confusion matrices,
    predictions, attention maps and entropies. The report is one file that opens without a server or a network.

    Example: polaformer demo --out demo

    Example: polaformer demo --epochs 5 --seed 1
    """

    out: Path = Path("demo")
    """Directory for the report, results.json and both runs; created if it does not exist."""
    epochs: int = POLA_VIT_TINY.epochs
    """Number of epochs of each training run."""
    seed: int = 0
    """Seed of all random numbers."""
    json: bool = False
    """Print the result as JSON on stdout, and nothing else."""

    def run(self) -> int:
        """Trains both models and reports."""
        if not 1 <= self.epochs <= 10_000:
            raise UsageError(f"--epochs is {self.epochs}; give an integer from 1 to 10,000")
        if not 0 <= self.seed < 2**63:
            raise UsageError(f"--seed is {self.seed}; give an integer from 0 to 2^63 - 1")
        require("train", "accelerate", "tensorboard", "matplotlib", "sklearn")
        prepare_folder(self.out, "--out")
        load("polaformer.tasks.running", "polaformer.analysis.report", "polaformer.analysis.machine")
        from polaformer.analysis.machine import described
        from polaformer.analysis.report import write_report

        # One compute thread: with more, they would spend these small steps waiting for each other.
        with described(threads=1) as machine:
            results = [self._train(name, attention) for name, attention in TWINS.items()]
        report = self.out / "report.html"
        title = "PolaFormer and its softmax twin"
        write_report(report, title, results, lead=LEAD, command=f"polaformer demo --seed {self.seed}")
        self._report(results, report, machine)
        return 0

    def _train(self, name: str, attention: str) -> "RunResult":
        from polaformer.cli.run_report import as_run_result
        from polaformer.tasks.running import train

        warmup = min(POLA_VIT_TINY.warmup_epochs, self.epochs)
        recipe = replace(POLA_VIT_TINY, attention=attention, epochs=self.epochs, warmup_epochs=warmup, seed=self.seed)
        with TrainingView(name, recipe) as view:
            finished = train(recipe, _unused_path(self.out / "runs" / attention), view)
        return as_run_result(finished, name)

    def _report(self, results: "list[RunResult]", report: Path, machine: dict[str, Any]) -> None:
        records = [_record(result) for result in results]
        result = {"command": "demo", "seed": self.seed, "epochs": self.epochs, "machine": machine, "results": records}
        result |= {"report": report.as_posix()}
        with writing(self.out):
            (self.out / "results.json").write_text(to_json(result), encoding="utf-8")
        if self.json:
            print_json(result)
            return
        table = new_table(
            f"Handwritten digits, {self.epochs} epochs, {records[0]['samples']} held-out test digits",
            "model",
            "parameters",
            "accuracy",
            "correct",
            "training time (s)",
            "mean entropy (nats)",
            caption="entropy: mean over attention rows on test digits, blocks and streams; lower is sharper",
        )
        for record in records:
            numbers = f"{record['parameters']:,}", f"{record['accuracy']:.2f} %", f"{record['correct']}"
            table.add_row(record["name"], *numbers, f"{record['seconds']:.0f}", f"{record['entropy']:.2f}")
        print_all(table, *machine_lines(machine), f"saved {report.as_posix()}: open it in a browser")


def _unused_path(path: Path) -> Path:
    """The path, or if it exists the first unused one of `path-1`, `path-2`, …; a demo may be run twice."""
    number, found = 0, path
    while found.exists():
        number += 1
        found = path.with_name(f"{path.name}-{number}")
    return found


def _record(result: "RunResult") -> dict[str, Any]:
    seconds = [line["wall"]["seconds"] for line in result.journal]
    known = {"name": result.name, "parameters": result.parameters, "seconds": max(seconds), "entropy": result.mean_entropy}
    return known | result.record
