"""The report of training runs, and its attention maps: those that the layers apply."""

import io
import re
from base64 import b64decode
from html.parser import HTMLParser
from math import log
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from models import images, small
from polaformer.analysis import report, training_figures
from polaformer.analysis.attention_maps import attention_maps, row_at, visit_maps
from polaformer.analysis.report import RunResult, write_report
from polaformer.analysis.training_figures import block_label, shorten
from polaformer.attention import AttentionLayer, WindowAttention
from polaformer.data.sources.arrays import Arrays
from polaformer.data.transforms import Preprocessing
from polaformer.errors import CannotWriteError, ImageError
from polaformer.tasks.classification.figures import collect_figures
from polaformer.tasks.classification.objective import ClassificationCounts
from polaformer.tasks.classification.predictor import Classifier
from polaformer.tasks.classification.recipe import ClassificationRecipe
from polaformer.tasks.figures import AttentionInputs, Confusion, Curves, PictureRow, Pictures, Predictions, Rows

NASTY = "<script>alert(1)</script>"
GLOBAL = ["pola_deit_tiny", "softmax_deit_tiny", "pola_pvt_tiny", "softmax_pvt_tiny"]
SWIN = ["pola_swin_tiny", "softmax_swin_tiny"]


def layers(model: nn.Module) -> dict[str, AttentionLayer]:
    return {name: module for name, module in model.named_modules() if isinstance(module, AttentionLayer)}


@pytest.mark.parametrize("name", GLOBAL + SWIN)
def test_every_layer_has_maps_whose_rows_sum_to_one(name: str) -> None:
    model = small(name, attention_options={"eps": 0.0} if name.startswith("pola") else None)
    found = attention_maps(model, images())
    assert [block.name for block in found] == list(layers(model))
    for block in found:
        assert block.grid is not None
        assert block.key_grid is not None
        num_queries = block.num_prefix_tokens + block.grid[0] * block.grid[1]
        num_keys = block.num_prefix_tokens + block.key_grid[0] * block.key_grid[1]
        for weights in block.maps.values():
            assert weights.shape[2:] == (num_queries, num_keys)
            torch.testing.assert_close(weights.sum(dim=-1), torch.ones(weights.shape[:3]), atol=1e-4, rtol=0)
        assert set(block.entropy) == set(block.maps)
        assert all(0 <= mean <= log(block.num_keys) + 1e-5 for mean in block.entropy.values())


def test_random_mechanisms_show_the_maps_that_they_apply() -> None:
    """The maps draw random numbers before the layer does: both must draw the same ones."""
    model = small("pola_deit_tiny", attention="informer", attention_options={"factor": 1})
    seen: list[Any] = []
    for block in model.blocks:
        block.attn.core.register_forward_hook(lambda core, inputs, output: seen.append((core, inputs[2], output)))
    shown = attention_maps(model, images(2))
    assert len(shown) == len(seen) == 2
    for block, (core, v, out) in zip(shown, seen, strict=True):
        torch.testing.assert_close(core.apply_maps(block.maps, v), out)


@pytest.mark.parametrize("name", GLOBAL)
def test_the_maps_of_a_model_are_those_that_its_cores_apply(name: str) -> None:
    model, batch, applied = small(name), images(), {}
    for layer_name, layer in layers(model).items():
        assert isinstance(layer.core, nn.Module)
        layer.core.register_forward_hook(lambda _, args, out, key=layer_name: applied.update({key: (args[2], out)}))
    with torch.no_grad():
        model(batch)
    for block in attention_maps(model, batch):
        v, out = applied[block.name]
        parts = v.split([-(-v.shape[-1] // 2), v.shape[-1] // 2], dim=-1) if len(block.maps) == 2 else [v]
        by_maps = torch.cat([weights @ part for weights, part in zip(block.maps.values(), parts, strict=True)], dim=-1)
        torch.testing.assert_close(by_maps, out, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("size", [(64, 64), (40, 84)], ids=str)
def test_the_maps_of_windows_on_the_grid_are_those_that_the_layer_applies_shifted_and_padded_too(size: tuple[int, int]) -> None:
    model, batch, seen = small("softmax_swin_tiny"), images(2, *size), {}
    for name, layer in layers(model).items():
        layer.register_forward_hook(lambda layer, args, out, key=name: seen.update({key: (layer, args[0], out)}))
    with torch.no_grad():
        model(batch)
        for block in attention_maps(model, batch):
            layer, x, out = seen[block.name]
            assert isinstance(layer, WindowAttention)
            assert block.num_keys == layer.window**2
            v = layer.qkv(x).chunk(3, dim=-1)[2].unflatten(-1, (layer.num_heads, -1)).transpose(1, 2)
            by_maps = layer.proj((block.maps["softmax"] @ v).transpose(1, 2).flatten(2))
            torch.testing.assert_close(by_maps, out, rtol=1e-4, atol=1e-4)


def test_catching_maps_leaves_no_hook_and_no_other_mode_behind_even_after_an_error() -> None:
    model = small("pola_deit_tiny").train()
    model.blocks[0].eval()
    before = [module.training for module in model.modules()]
    attention_maps(model, images())
    with pytest.raises(ValueError, match="tensor of images"):
        attention_maps(model, images(channels=1))
    assert [module.training for module in model.modules()] == before
    assert not any(module._forward_pre_hooks or module._forward_hooks for module in model.modules())


def test_rows_without_key_mass_have_no_entropy_and_break_nothing() -> None:
    model = small("pola_deit_tiny", attention_options={"polarity": "positive"})
    last = model.blocks[-1].attn
    nn.init.zeros_(last.qkv.weight)
    nn.init.constant_(last.qkv.bias, -1.0)  # no positive part, so all products are zero
    nn.init.zeros_(last.key_positions.rows)
    first, second = attention_maps(model, images())
    assert set(first.entropy) == {"positive"}
    assert second.entropy == {}
    assert not second.maps["positive"].any()


def test_layers_with_larger_maps_than_wanted_are_passed_over() -> None:
    model = small("pola_pvt_tiny")
    found = visit_maps(model, images(1), lambda block: block, max_weights=8**4 * 2)
    assert [block.grid for block in found] == [(8, 8), (8, 8), (4, 4), (2, 2)]


def test_the_picture_of_a_row_is_the_mean_over_heads_of_the_query_at_the_place() -> None:
    for block in attention_maps(small("softmax_pvt_tiny"), images()):
        row = row_at(block, (0.99, 0.5))
        assert block.grid is not None
        height, width = block.grid
        assert row.query == (height - 1, width // 2)
        wanted = block.maps["softmax"][0, :, (height - 1) * width + width // 2].mean(dim=0).reshape(block.key_grid)
        torch.testing.assert_close(row.heatmaps["softmax"], wanted)


def test_names_are_shortened_in_the_middle_and_blocks_are_counted_from_one() -> None:
    assert shorten("black-footed ferret 12", 12) == "black-f…t 12"
    assert shorten("tab\nby \udcff") == "tab by \\udcff"
    assert block_label("stages.1.blocks.0.attn") == "block 2.1"
    assert block_label("attn") == "attn"


class Page(HTMLParser):
    """The tags and links of a page."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.targets: list[str] = []
        self.alts: list[str] = []
        self.ids: list[str] = []
        self.marked = 0
        self.source = path.read_text()
        self.feed(self.source)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = {name: value or "" for name, value in attrs}
        self.tags.append(tag)
        self.targets += [found[name] for name in ("src", "href", "srcset", "action", "data", "poster") if name in found]
        self.alts += [found["alt"]] if tag == "img" else []
        self.ids += [found["id"]] if "id" in found else []
        self.marked += found.get("class") == "differs"

    def check_self_contained(self) -> None:
        assert all(target.startswith(("data:image/png;base64,", "data:image/jpeg;base64,", "#")) for target in self.targets)
        assert {target[1:] for target in self.targets if target.startswith("#")} <= set(self.ids)
        assert not {"script", "link", "iframe", "object", "embed"} & set(self.tags)
        without_images = re.sub(r"base64,[^\"]*", "", self.source)
        assert not re.search(r"https?:|url\(|@import|//", without_images)
        assert len(self.alts) == self.tags.count("img") == self.tags.count("figcaption")
        assert all(self.alts)


def run_result(
    model: nn.Module | None = None,
    *,
    num_classes: int = 5,
    channels: int = 3,
    num_images: int = 20,
    classes: tuple[str, ...] | None = None,
    num_whole: int | None = None,
    **changes: Any,
) -> RunResult:
    """A run as a classification job reports it; num_whole: number of readable images, all of them if not given."""
    generator = np.random.default_rng(0)
    shape = (num_images, 20, 28, 3) if channels == 3 else (num_images, 20, 28)
    labels = generator.integers(0, num_classes, num_images)
    classes = classes or tuple(f"class {label}" for label in range(num_classes))
    model = model or small("pola_deit_tiny", num_classes=num_classes, in_chans=channels, img_size=16)
    counts = ClassificationCounts(num_classes)
    counts.confusion += 9 * torch.eye(num_classes, dtype=torch.long)
    counts.confusion[0, 1] = 3
    wall = {"wall": {"seconds": 7.5}, "epoch": 1.0, "step": 3}
    journal = [{"kind": "train", "loss": 1.25, **wall}, {"kind": "eval", "accuracy": 61.5, "unreadable": 2, **wall}]
    classifier = Classifier(model, classes, Preprocessing((16, 16), (0.5,) * channels, (0.25,) * channels))
    source = Damaged(generator.integers(0, 256, shape, dtype=np.uint8), labels, classes, "test")
    source.num_whole = num_images if num_whole is None else num_whole
    values = {
        "name": "PolaFormer",
        "parameters": 1234,
        "terms": ClassificationRecipe.terms,
        "split": "val",
        "record": counts.record(),
        "summary": counts.summary(),
        "num_unreadable": 2,
        "journal": journal,
        "figures": collect_figures(classifier, counts, source),
        "settings": {"model": "pola_deit_tiny", "lr": 1e-3, "dims": (16,), "checkpoint": None},
    }
    return RunResult(**(values | changes))


class Damaged(Arrays):
    """Images of which only the first `num_whole` can be read."""

    num_whole = 0

    def read(self, index: int, channels: int) -> Any:
        if index >= self.num_whole:
            raise ImageError(f"{index} is damaged")
        return super().read(index, channels)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Page:
    """The report of two runs of the same name, with class names that look like code or formulas."""
    torch.manual_seed(0)
    classes = (NASTY, "$\\frac$ &", '" onload="', "猫", "bad \udcff", "a")
    one = run_result(num_classes=6, classes=classes)
    model = small("softmax_deit_tiny", num_classes=6, img_size=16)
    other = run_result(model, num_classes=6, settings={"model": NASTY, "lr": 1e-3, "dims": (16,), "depths": (2,)})
    runs = [one, other]
    path = tmp_path_factory.mktemp("report") / "report.html"
    write_report(path, f"Digits {NASTY}", runs, lead=f"lead {NASTY}", command=f"polaformer train {NASTY}")
    return Page(path)


def test_the_report_needs_nothing_but_itself(pair: Page) -> None:
    pair.check_self_contained()
    assert len(pair.alts) == 1 + 2 + 2 + 2 + 1  # curves, confusion, predictions, maps, entropies


def test_everything_from_data_is_escaped(pair: Page) -> None:
    assert NASTY not in pair.source
    assert pair.source.count("&lt;script&gt;alert(1)&lt;/script&gt;") >= 5  # title, heading, lead, settings, command
    assert '" onload="' not in pair.source


def test_runs_of_one_name_are_told_apart_and_settings_that_differ_are_marked(pair: Page) -> None:
    assert "<h3>PolaFormer</h3>" in pair.source
    assert "<h3>PolaFormer (2)</h3>" in pair.source
    assert pair.marked == 2  # model and depths, which one of the runs does not have; None is not marked
    assert pair.source.index("≠ model") < pair.source.index(">lr<")


def test_the_table_holds_the_numbers_of_counts_and_journal(pair: Page) -> None:
    for text in ("54 of 57", "94.74 %", "top-5", "1.250", "7.5 s", "nats", "2 could not be read"):
        assert text in pair.source


@pytest.mark.parametrize(
    "options",
    [
        {"num_classes": 2, "channels": 1, "num_images": 1, "journal": []},
        {"num_classes": 150, "channels": 3},
        {"num_classes": 30, "channels": 1, "model": "pola_swin_tiny"},
    ],
    ids=["2 classes, 1 image, empty journal", "150 classes, 3 channels", "30 classes, windows"],
)
def test_any_number_of_classes_channels_and_images_is_reported(tmp_path: Path, options: dict[str, Any]) -> None:
    sizes = {"num_classes": options["num_classes"], "in_chans": options["channels"], "img_size": 16}
    model = small(options.get("model", "pola_deit_tiny"), **sizes)
    write_report(tmp_path / "report.html", "sizes", [run_result(**(options | {"model": model}))])
    page = Page(tmp_path / "report.html")
    page.check_self_contained()
    assert len(page.alts) == 5
    assert ("top-5" in page.source) == (options["num_classes"] > 5)
    assert [path.name for path in tmp_path.iterdir()] == ["report.html"]


def test_the_mean_entropy_is_that_of_all_blocks_streams_and_images() -> None:
    run = run_result(num_images=3)
    shown = run.figures["Attention maps"]
    assert isinstance(shown, AttentionInputs)
    assert len(shown.images) == 3
    found = [mean for block in attention_maps(shown.model, torch.stack(shown.images)) for mean in block.entropy.values()]
    assert len(found) == 4
    assert run.mean_entropy == pytest.approx(sum(found) / 4, abs=1e-5)
    assert run_result(Pooled(5)).mean_entropy is None


class Pooled(nn.Module):
    """A classifier without attention."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(3, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x.mean(dim=(2, 3)))


def test_what_cannot_be_shown_is_said(tmp_path: Path) -> None:
    journal = [{"kind": "train", "loss": 2.0, "epoch": 1.0, "wall": {"seconds": 1.0}}]
    runs = [run_result(Pooled(5), journal=journal, num_whole=0), run_result(Pooled(5), journal=journal)]
    write_report(tmp_path / "report.html", "few", runs)
    page = Page(tmp_path / "report.html")
    page.check_self_contained()
    assert "None of the validation images could be read" in page.source
    assert "gives no attention maps" in page.source
    assert "not in the journal" in page.alts[0]


def test_pictures_curves_and_tables_of_numbers_are_shown(tmp_path: Path) -> None:
    red, wide = Image.new("RGB", (30, 20), (200, 10, 10)), Image.new("L", (40, 10))
    rows = [PictureRow(f"first {NASTY}", (("truth", red), (f"found {NASTY}", wide))), PictureRow("second", (("alone", red),))]
    figures = {
        "Pictures": Pictures(rows, "Left: truth."),
        "Curves": Curves({NASTY: [(0.0, 1.0), (1.0, 0.5)], "empty": []}, "recall", "precision", "On x.", unit_square=True),
        "No curves": Curves({"empty": []}, "recall", "precision"),
        "Table": Rows(("class", "AP"), [(NASTY, "1.5")], numeric=True),
    }
    write_report(tmp_path / "report.html", "pictures", [run_result(Pooled(5), figures=figures)])
    page = Page(tmp_path / "report.html")
    page.check_self_contained()
    assert NASTY not in page.source
    assert page.alts[1:4] == ["first <script>alert(1)</script>: truth", f"first {NASTY}: found {NASTY}", "second: alone"]
    assert len(page.alts) == 6  # with the learning curves and two figures of curves
    [first, *_] = re.findall(r"data:image/jpeg;base64,([^\"]+)\" alt=\"[^\"]+\" width=\"30\" height=\"20\"", page.source)
    with Image.open(io.BytesIO(b64decode(first))) as shown:
        assert shown.size == (30, 20)
        assert np.abs(np.asarray(shown, dtype=int) - (200, 10, 10)).max() < 10
    assert page.source.count('<table class="numbers">') == 2  # with the results


def test_wrong_predictions_come_first_and_unreadable_images_are_passed_over() -> None:
    found = run_result(Pooled(2), num_classes=2, num_images=40).figures["Predictions"]
    assert isinstance(found, Predictions)
    samples = found.samples
    num_wrong = sum(not sample.is_right for sample in samples)
    assert 0 < num_wrong <= found.most_wrong
    assert [sample.is_right for sample in samples] == [False] * num_wrong + [True] * (len(samples) - num_wrong)
    assert all((sample.true == sample.predicted) == sample.is_right for sample in samples)
    few = run_result(Pooled(2), num_classes=2, num_images=40, num_whole=3).figures["Predictions"]
    assert isinstance(few, Predictions)
    assert len(few.samples) == 3


def test_the_query_is_where_the_stroke_is_on_dark_and_on_light_ground() -> None:
    stroke = torch.zeros(1, 16, 16)
    stroke[:, 4:8, 8:12] = 1.0
    for image in (stroke, 1 - stroke):
        assert report._salient_position(image) == (6 / 16, 10 / 16)


def test_a_report_that_cannot_be_written_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "missing" / "report.html"
    with pytest.raises(CannotWriteError, match=r"missing/report\.html"):
        write_report(path, "title", [run_result(num_images=1)])
    with pytest.raises(ValueError, match="at least one run"):
        write_report(path, "title", [])


def test_a_confusion_of_pixels_is_told_in_percent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their counts would not fit into the cells."""
    written = []
    monkeypatch.setattr(training_figures, "_number_cells", lambda axes, numbers, share: written.append(numbers.tolist()))
    counts = torch.tensor([[997_000, 3_000], [500_000, 500_000]])
    for parts in ("pixels", None):
        run = run_result(figures={"Confusion": Confusion(counts, ("sky", "sea"), "test", parts)})
        write_report(tmp_path / "report.html", "title", [run])
        page = (tmp_path / "report.html").read_text()
        assert f"1,497,000 of 2,000,000 test {parts or 'images'} are classified correctly" in page
        assert ("Numbers: % of the pixels of the true class" in page) == (parts is not None)
    assert written == [[[100.0, 0.0], [50.0, 50.0]], counts.tolist()]
