"""`polaformer convert`: rewrite any readable weights file in our format."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from polaformer.cli.errors import UsageError
from polaformer.cli.output import load, new_table, print_all, print_json, print_line
from polaformer.errors import DataError, printable
from polaformer.regular_files import writing

if TYPE_CHECKING:
    from torch import nn

    from polaformer.backbones.loading import Loaded
    from polaformer.weights.errors import WeightsError

MAX_LINES = 40  # of an error message, which may list hundreds of parameter names


@dataclass(frozen=True)
class Convert:
    """Convert the authors' .pth, timm weights or any state dict to our safetensors format.

    The model is recognised by the names and shapes of its parameters, or given with --model; position tables are resized to
    fit it. No code in the file is executed.

    Example: polaformer convert pola_swin_t.pth pola_swin_tiny.safetensors

    Example: polaformer convert pola_swin_t.pth start_384.safetensors --model pola_swin_tiny_384
    """

    source: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="IN")]]
    """The file to read: .pth or .safetensors."""
    target: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="OUT")]]
    """The .safetensors file to write."""
    model: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """The model that the weights are for, as listed by `polaformer models`; recognised if not given."""
    img_size: Annotated[int | None, tyro.conf.arg(metavar="PIXELS")] = None
    """Native image size of the model in pixels; the model's default if not given."""
    overwrite: bool = False
    """Replace the target if it exists."""
    json: bool = False
    """Print the result as JSON on stdout, and nothing else."""

    def run(self) -> int:
        """Check, read and write, then report."""
        self._check()
        if not self.json:
            print_line(f"reading {printable(self.source)}", stderr=True)
        load("polaformer.backbones")
        from polaformer.backbones.loading import save_weights
        from polaformer.weights.errors import WeightsError

        try:
            model, loaded = self._loaded()
        except WeightsError as error:
            raise DataError(*_truncated(str(error).split("\n")), *self._recognised(error)) from error
        with writing(str(self.target)):
            save_weights(model, self.target)
        self._report(model, loaded)
        return 0

    def _check(self) -> None:
        if self.target.suffix != ".safetensors":
            raise UsageError(f"the target is {self.target}; give a name that ends in .safetensors")
        if self.target.exists() and not self.overwrite:
            raise UsageError(f"{self.target} exists; give another name, or --overwrite")
        if not self.target.parent.is_dir():
            raise UsageError(f"there is no directory {self.target.parent}; create it, or give another target")
        if self.img_size is not None and self.img_size < 1:
            raise UsageError(f"--img-size is {self.img_size}; give a number of pixels ≥ 1")
        if not self.source.exists() or self.source.is_dir():
            raise UsageError(f"there is no file {self.source}; give a .pth or .safetensors file")

    def _loaded(self) -> "tuple[nn.Module, Loaded]":
        from polaformer.backbones import create_model
        from polaformer.backbones.loading import load_weights
        from polaformer.backbones.recognition import model_of_file, num_classes_of
        from polaformer.weights.files import read_state_dict

        arguments: dict[str, Any] | None
        if self.model is None:
            state = read_state_dict(self.source)
            arguments = model_of_file(self.source, state)
            if arguments is None:
                raise DataError(
                    f"the {len(state)} tensors of {self.source} match none of our models exactly; name the model with --model "
                    "(polaformer models lists them) to see the differences"
                )
        else:
            self._check_model(self.model)
            arguments = {"name": self.model, "num_classes": num_classes_of(read_state_dict(self.source))}
        if self.img_size is not None:
            arguments["img_size"] = self.img_size
        model = create_model(**arguments)
        return model, load_weights(model, self.source)

    def _recognised(self, error: "WeightsError") -> list[str]:
        """A line that names the model in the file, if it is not the requested one."""
        from polaformer.backbones.recognition import recognise
        from polaformer.weights.files import read_state_dict

        found = recognise(read_state_dict(self.source)) if self.model and error.misfits else None
        return [f"The file is a {found['name']} with {found['num_classes']} classes."] if found else []

    def _check_model(self, name: str) -> None:
        from polaformer.backbones.registry import check_name

        try:
            check_name(name)
        except ValueError as error:
            raise UsageError(str(error)) from error

    def _report(self, model: "nn.Module", loaded: "Loaded") -> None:
        built_from: dict[str, Any] = model.built_from  # type: ignore[assignment]
        num_params = sum(parameter.numel() for parameter in model.parameters())
        size = self.target.stat().st_size
        if self.json:
            result = {"command": "convert", "source": str(self.source), "target": str(self.target), "model": built_from}
            print_json(result | {"params": num_params, "bytes": size, "resized": loaded.resized, "left_out": loaded.left_out})
            return
        table = new_table(f"{self.source} → {self.target}", "written", "")
        table.add_row("model", built_from["name"])
        table.add_row("classes", str(built_from.get("num_classes")))
        table.add_row("parameters", f"{num_params / 1e6:.2f} M")
        table.add_row("file", f"{size / 1e6:.1f} MB")
        table.add_row("tables resized", str(len(loaded.resized)))
        print_all(table, *loaded.resized, *(f"left out: {key}" for key in loaded.left_out))


def _truncated(lines: list[str]) -> list[str]:
    """At most MAX_LINES lines: the first ones, a count of those left out, and the last one."""
    if len(lines) <= MAX_LINES:
        return lines
    return [*lines[: MAX_LINES - 2], f"  … and {len(lines) - MAX_LINES + 1} more lines", lines[-1]]
