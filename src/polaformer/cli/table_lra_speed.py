"""`polaformer table lra-speed`: throughput and memory of training steps on the Long Range Arena, as ratios to softmax."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rich.table import Table

from polaformer.cli.bench_tables import IN_BRACKETS, mebibytes, number, ratio_text
from polaformer.cli.errors import UsageError
from polaformer.cli.output import counted, load, machine_lines, new_table, print_all, print_json
from polaformer.data.sources.lra.datasets import DATASETS, DatasetName
from polaformer.errors import nearest
from polaformer.tasks.sequence.published import SPEED, TASKS, printed_memory, printed_speedup
from polaformer.tasks.sequence.rows import ARENA_ROWS

if TYPE_CHECKING:
    from polaformer.analysis.lra_speed import SpeedRow

NOTES = (
    "A step is forward, backward, clipping and the update, on sequences of the full length, without evaluations. Tokens:",
    "batch × N; of the two documents of Retrieval one is counted, as in the paper. softmax: PyTorch's fused kernel;",
    "softmax-materialised: with its N×N maps, as in the paper, where it is also checkpointed. No attention weights are dropped",
    "out; in the paper those of softmax and kernelized are. Memory: peak of PyTorch's allocator for one micro-batch, beyond",
    "weights and inputs; on a CPU without what a native kernel allocates itself. The paper's ratios are to its materialised",
    "softmax, which is our row softmax-materialised; its memory of pola on Text and Retrieval is for half the batch of the",
    "others, as its bytes per token show.",
)


@dataclass(frozen=True)
class TableLraSpeed:
    """Time training steps on the Long Range Arena: tokens per millisecond and memory, relative to softmax.

    The mechanisms of a task are timed in interleaved rounds, with the same batch and micro-batch for all, in float32.

    Example: polaformer table lra-speed --tasks text listops --rows pola-a3 nystrom linformer --threads 1
    """

    tasks: tuple[DatasetName, ...] = TASKS
    """Tasks to time."""
    rows: tuple[str, ...] = ("softmax-materialised", *SPEED)
    """Rows to time, besides softmax (PyTorch's fused kernel); by default those of the paper's table."""
    batch: int = 4
    """Sequences per step; the paper has 16 to 256."""
    micro_batch: int | None = None
    """Sequences per micro-batch; by default the whole batch."""
    rounds: int = 9
    """Maximum number of timing rounds."""
    seconds: float = 60.0
    """Seconds per task: slow rows get fewer rounds, and a step that takes longer is skipped."""
    threads: int | None = None
    """Number of threads torch may use; by default torch's own choice."""
    device: Literal["cpu", "cuda"] = "cpu"
    """The device to compute on."""
    json: bool = False
    """Print the result as JSON on stdout, and nothing else."""

    def run(self) -> int:
        """Times all rows of each task, and prints the tables."""
        self._check()
        load("polaformer.analysis.lra_speed", "polaformer.analysis.machine")
        from polaformer.analysis.lra_speed import BASELINE, compare
        from polaformer.analysis.machine import described

        rows = list(dict.fromkeys([BASELINE, *self.rows]))
        sizes: dict[str, Any] = {"batch": self.batch, "micro_batch": self.micro_batch or self.batch}
        with described(self.threads) as machine, counted(len(rows) * (self.rounds + 2), len(self.tasks)) as begin:
            limits: dict[str, Any] = {"rounds": self.rounds, "seconds": self.seconds, "device": self.device}
            found = {task: compare(task, rows, on_call=begin(task), **sizes, **limits) for task in self.tasks}
        if self.json:
            records = {task: {row: one.as_record() for row, one in ours.items()} for task, ours in found.items()}
            print_json({"command": "table lra-speed", "device": self.device, **sizes, "machine": machine, "tasks": records})
        else:
            setting = f"batch {self.batch}, micro-batch {sizes['micro_batch']}, float32"
            print_all(*(_table(task, ours, setting) for task, ours in found.items()), *NOTES, *machine_lines(machine))
        return 0

    def _check(self) -> None:
        known = [*ARENA_ROWS, "softmax-materialised"]
        for name in self.rows:
            if name not in known:
                raise UsageError(f"--rows has {name!r}; {nearest(name, known)}choose from {', '.join(known)}")
        least = {"batch": self.batch, "rounds": self.rounds, "micro-batch": self.micro_batch, "threads": self.threads}
        for option, value in least.items():
            if value is not None and value < 1:
                raise UsageError(f"--{option} is {value}; give an integer ≥ 1")
        if not self.seconds > 0:
            raise UsageError(f"--seconds is {self.seconds:g}; give a number > 0")
        if self.micro_batch is not None and self.batch % self.micro_batch:
            raise UsageError(f"--batch is {self.batch}, which is not a multiple of --micro-batch {self.micro_batch}")


def _table(task: DatasetName, rows: "dict[str, SpeedRow]", setting: str) -> Table:
    from polaformer.analysis.lra_speed import BASELINE, MATERIALISED

    in_paper = {BASELINE: "", MATERIALISED: BASELINE}  # whose softmax is materialised
    with_maps = MATERIALISED in rows
    title = f"{task}, N = {DATASETS[task].length}, {setting}"
    maps, paper = ["×\nmaterialised"] * with_maps, "paper, ×\nmaterialised"
    columns = ["ms / step", "tokens / ms", "× softmax", *maps, paper, "peak MiB"]
    columns += ["of softmax", *(["of\nmaterialised"] * with_maps), "paper, of\nmaterialised"]
    found = new_table(title, "row", *columns, caption=f"×: more than 1 is faster; {IN_BRACKETS}")
    for name, row in rows.items():
        median = row.timing.median
        time = f"skipped: one step took {row.timing.first:.0f} s" if median is None else f"{1e3 * median:.0f}"
        speeds = [number(row.tokens_per_millisecond, ".1f"), ratio_text(row.speedup)]
        speeds += [ratio_text(row.speedup_over_materialised)] * with_maps
        memory = [mebibytes(row.peak_bytes), number(row.memory_ratio)]
        memory += [number(row.memory_ratio_to_materialised, ".3g")] * with_maps
        other = in_paper.get(name, name)
        printed = number(printed_speedup(other, task)), number(printed_memory(other, task), ".3g")
        found.add_row(name, time, *speeds, printed[0], *memory, printed[1])
    return found
