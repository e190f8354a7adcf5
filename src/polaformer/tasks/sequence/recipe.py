"""The hyperparameters of a training run on long sequences. Importable without PyTorch."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from polaformer.data.sources.lra.datasets import DATASETS, DatasetName, DatasetSpec
from polaformer.tasks.attention_options import attention_option_problems, parse_attention_options
from polaformer.tasks.recipe import Recipe
from polaformer.training.metric import Metric, TaskTerms

if TYPE_CHECKING:
    from polaformer.tasks.sequence.job import SequenceJob

HINTS = {
    "listops": "the directory that `polaformer data listops --out DIR` makes",
    "pathfinder": "the directory that `polaformer data pathfinder --out DIR` makes",
    "text": "the IMDb reviews as an aclImdb tree, a Hugging Face directory or JSON lines",
    "retrieval": "the AAN pairs: a directory with new_aan_pairs.*.tsv, or with pairs and documents files",
    "image": "CIFAR-10 in its binary form, or an .npz",
}


@dataclass(frozen=True, kw_only=True)
class SequenceRecipe(Recipe):
    """Classification of long sequences. The defaults are those of Skyformer's code for the Long Range Arena, for Text."""

    task: ClassVar[str] = "sequence"
    terms: ClassVar[TaskTerms] = TaskTerms(Metric("accuracy", "%"), "sequences")

    data: str | None = None
    """The data in their released or prepared form; `polaformer data` makes or prepares them."""
    dataset: DatasetName = "text"
    """Dataset of the Long Range Arena."""
    tokenisation: Literal["A", "B"] = "A"
    """ListOps: A drops the closing brackets, as the published results do; B keeps them."""
    black: Literal["masked", "kept"] = "masked"
    """Images: black pixels are masked, as in the published code, or are tokens like the others."""
    selection: Literal["published", "held-out"] = "published"
    """Text: the weights are chosen on the test set, as published, or on sequences held out from training (val_share)."""
    val_share: float = 0.1
    """Share of the training sequences to hold out if selection is held-out and there is no validation split."""
    eval_sequences: int | None = None
    """Validation sequences to evaluate on while training, always the same; None: all. The test split is evaluated in full."""
    attention: str = "pola"
    """Mechanism of all layers."""
    attention_options: tuple[str, ...] | None = None
    """Arguments of the attention layer and its mechanism as NAME=VALUE, such as alpha=5 or conv=None.
    Added to the recipe's own, which they replace by name; with another --attention they are all. None: the defaults alone."""
    convolution: Literal["sequence", "grid"] = "sequence"
    """The convolution of mechanisms that have one: over 5 neighbours in the sequence, or, for images, 5×5 on their grid."""
    dim: int = 64
    """Channels."""
    depth: int = 2
    """Layers."""
    num_heads: int = 2
    """Heads of each layer."""
    mlp_dim: int = 128
    """Hidden channels of the MLPs, and of the classifier."""
    dropout: float = 0.1
    """Dropout of embeddings, attention outputs and MLPs."""
    kept: int | None = None
    """Maximum number of tokens read per document; None: as published (2000 ListOps, 4000 Text and Retrieval, 1024 images)."""
    length: int | None = None
    """Number of positions, to which the published code pads documents; None: as published (2048, 4096, 1024)."""
    pooling: Literal["padded", "valid"] = "padded"
    """Divide the sum over tokens by `length`, padding included, as published; or by the number of tokens that exist."""
    trim: bool | None = None
    """Sort the sequences of an update by length and cut each micro-batch to its longest; None: if that changes no result."""

    @property
    def spec(self) -> DatasetSpec:
        """The dataset as the published models read it."""
        return DATASETS[self.dataset]

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens read per document."""
        return self.spec.kept if self.kept is None else self.kept

    @property
    def num_positions(self) -> int:
        """Rows of the position table."""
        return self.spec.length if self.length is None else self.length

    @property
    def shift(self) -> int:
        """What is added to a symbol to get its id; id 0 is masked."""
        return 1 if self.black == "kept" else self.spec.shift

    @property
    def vocabulary(self) -> int:
        """Rows of the embedding table: one more than published for images whose black pixels are kept."""
        return max(self.spec.vocabulary, 256 + self.shift) if self.spec.side else self.spec.vocabulary

    @property
    def example_inputs(self) -> str:
        """As many inputs of `polaformer predict` as a sample has documents."""
        return " ".join(["INPUT"] * self.spec.num_documents)

    def problems(self) -> list[str]:
        """All problems with the values, one line each; needs neither the data nor PyTorch."""
        found = super().problems() + attention_option_problems(self.attention_options)
        if self.data is None:
            found.append(f"{self.name or self.dataset} needs data; give with --data {HINTS[self.dataset]}")
        counts = ("dim", "depth", "num_heads", "mlp_dim", "kept", "length", "eval_sequences")
        for name in counts:
            value = getattr(self, name)
            if value is not None and value < 1:
                found.append(f"{name} is {value}; give an integer ≥ 1")
        if not 0 <= self.dropout < 1:
            found.append(f"dropout is {self.dropout}; give a number in [0, 1)")
        if not 0 < self.val_share < 1:
            found.append(f"val_share is {self.val_share}; give a number in (0, 1)")
        if self.num_heads > 0 and self.dim % self.num_heads:
            found.append(f"dim is {self.dim}, which num_heads, {self.num_heads}, does not divide; give a multiple of it")
        if self.max_tokens > self.num_positions:
            found.append(f"kept is {self.max_tokens}, more than the {self.num_positions} positions; give a larger length")
        return found + self._image_problems()

    def _image_problems(self) -> list[str]:
        found, side = [], self.spec.side
        if side is None:
            if self.black != "masked":
                found.append(f"black is {self.black!r}, but {self.dataset} has no pixels; leave it out")
            if self.convolution != "sequence":
                found.append(f"convolution is {self.convolution!r}, but {self.dataset} has no grid; leave it out")
        elif self.max_tokens != side * side:
            found.append(f"kept is {self.max_tokens}, but every image of {self.dataset} has {side * side} pixels; leave it out")
        if self.convolution == "grid" and self.trim and side is not None:
            found.append("trim is true, but a convolution on the grid needs whole images; pass --trim false")
        return found

    def layer_options(self) -> dict[str, Any]:
        """The given arguments of the attention layers."""
        return parse_attention_options(self.attention_options)

    def job(self) -> "SequenceJob":
        """Opens the data and builds the model; loads PyTorch, raises SettingsError or DataError."""
        from polaformer.tasks.sequence.job import SequenceJob

        return SequenceJob(self)
