"""`polaformer convert`: a weights file of any readable kind as one of ours."""

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

MOST_LINES = 40  # of an error: what does not fit may be hundreds of names


@dataclass(frozen=True)
class Convert:
    """Turn the authors' .pth, timm's weights or any state dict into a safetensors file of ours.

    The model is recognised by the names and shapes of the parameters, or given; then tables are resized to it if need be.
    Nothing in the file is run.

    Example: polaformer convert pola_swin_t.pth pola_swin_tiny.safetensors

    Example: polaformer convert pola_swin_t.pth start_384.safetensors --model pola_swin_tiny_384
    """

    source: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="IN")]]
    """The file to read: .pth or .safetensors."""
    target: tyro.conf.Positional[Annotated[Path, tyro.conf.arg(metavar="OUT")]]
    """The file to write, a .safetensors."""
    model: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """The model that it is for, as `polaformer models` lists them; recognised unless given."""
    img_size: Annotated[int | None, tyro.conf.arg(metavar="PIXELS")] = None
    """The native size of that model in pixels; its own unless given."""
    overwrite: bool = False
    """Replace the target if it exists."""
    json: bool = False
    """Print the result as JSON on stdout and nothing else there."""

    def run(self) -> int:
        """Checks, reads, writes, and says what was done."""
        self._check()
        if not self.json:
            print_line(f"reading {printable(self.source)}", stderr=True)
        load("polaformer.backbones")
        from polaformer.backbones.loading import save_weights
        from polaformer.weights.errors import WeightsError

        try:
            model, loaded = self._loaded()
        except WeightsError as error:
            raise DataError(*_shortened(str(error).split("\n")), *self._what_it_is(error)) from error
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
            raise UsageError(f"there is no folder {self.target.parent}; make it, or give another target")
        if self.img_size is not None and self.img_size < 1:
            raise UsageError(f"--img-size is {self.img_size}; give a whole number of pixels")
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
                    f"{self.source} holds {len(state)} tensors that are no model of ours as it stands; say which one it is "
                    "for with --model (polaformer models lists them), and the differences are shown"
                )
        else:
            self._check_model(self.model)
            arguments = {"name": self.model, "num_classes": num_classes_of(read_state_dict(self.source))}
        if self.img_size is not None:
            arguments["img_size"] = self.img_size
        model = create_model(**arguments)
        return model, load_weights(model, self.source)

    def _what_it_is(self, error: "WeightsError") -> list[str]:
        """A line on the model that a file is for, if it is another than the one asked for."""
        from polaformer.backbones.recognition import recognise
        from polaformer.weights.files import read_state_dict

        found = recognise(read_state_dict(self.source)) if self.model and error.misfits else None
        return [f"The file is a {found['name']} of {found['num_classes']} classes."] if found else []

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


def _shortened(lines: list[str]) -> list[str]:
    """The first lines and the last one of a text that would fill more than a screen."""
    if len(lines) <= MOST_LINES:
        return lines
    return [*lines[: MOST_LINES - 2], f"  … and {len(lines) - MOST_LINES + 1} lines more", lines[-1]]
