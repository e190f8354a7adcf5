"""The mechanisms of the Long Range Arena's rows by name, such as "pola-a3" or "softmax". Needs no PyTorch."""

from typing import NamedTuple

ALPHAS = (3, 5, 7)  # of pola, in the paper's table
# Every other registered mechanism; a test compares the names with the registry, which needs PyTorch.
RIVALS = (
    "softmax",
    "local",
    "linear",
    "reformer",
    "performer",
    "synthesizer",
    "longformer",
    "informer",
    "bigbird",
    "linformer",
    "kernelized",
    "cosformer",
    "nystrom",
    "skyformer",
    "hedgehog",
    "angular",
    "efficient",
    "enhanced",
    "focused",
    "hydra",
    "mobile",
)

DROPOUT = dict.fromkeys(("softmax", "kernelized"), ("dropout=0.1",))  # of attention weights, in Skyformer's code


class ArenaRow(NamedTuple):
    """A mechanism with its options, as a row of the table."""

    attention: str
    options: tuple[str, ...] | None = None


ARENA_ROWS = {f"pola-a{alpha}": ArenaRow("pola", (f"alpha={alpha}",)) for alpha in ALPHAS} | {
    name: ArenaRow(name, DROPOUT.get(name)) for name in RIVALS
}
