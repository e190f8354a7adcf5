"""The report of one or several training runs: one self-contained HTML file to read, print or send."""

import io
from base64 import b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from html import escape
from math import log
from pathlib import Path
from statistics import fmean
from typing import Any

import torch.nn.functional as F
from PIL.Image import Image
from torch import Tensor

import polaformer
from polaformer.analysis import training_figures
from polaformer.analysis.attention_maps import BlockRow, row_at, visit_maps
from polaformer.analysis.machine import fingerprint
from polaformer.analysis.training_figures import journal_lines
from polaformer.regular_files import write_atomically, writing
from polaformer.tasks.figures import AttentionInputs, Confusion, Curves, Figure, Pictures, Predictions, Rows, Text
from polaformer.training.metric import TaskTerms

MAX_WEIGHTS = 50_000_000  # entries of one map: 200 MB
MAX_TOTAL_WEIGHTS = 100_000_000  # entries of the maps of all images: takes seconds

STYLE = """
:root { color-scheme: light dark; --text: #1b1f24; --soft: #57606a; --back: #fff; --line: #d0d7de; --band: #f6f8fa;
  --mark: #fff1c2; }
@media (prefers-color-scheme: dark) { :root { --text: #e6edf3; --soft: #9aa4af; --back: #0d1117; --line: #30363d;
  --band: #161b22; --mark: #4a3b0b; } img { filter: brightness(.9); } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 64rem; padding: 1.5rem 1rem 4rem; background: var(--back); color: var(--text);
  font: 1rem/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .5rem; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .75rem; padding-bottom: .25rem; border-bottom: 1px solid var(--line); }
h3 { font-size: 1rem; margin: 1.25rem 0 .5rem; }
.title { font-weight: 600; font-size: .92rem; margin: 1.25rem 0 .35rem; break-after: avoid; }
.pictures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 20rem), 1fr)); gap: .75rem;
  align-items: start; }
.pictures figure { margin: 0; }
nav { display: flex; flex-wrap: wrap; gap: .25rem 1rem; margin: 1rem 0; font-size: .9rem; }
a { color: inherit; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; font-size: .92rem; }
th, td { padding: .35rem .7rem; text-align: left; vertical-align: top; border-bottom: 1px solid var(--line); }
thead th { background: var(--band); }
tbody th { font-weight: 600; }
td { overflow-wrap: anywhere; min-width: 6rem; }
.numbers td, .numbers thead th + th { text-align: right; white-space: nowrap; min-width: 0; }
tr.differs { background: var(--mark); }
figure { margin: 0 0 1.25rem; break-inside: avoid; }
figure img { display: block; max-width: 100%; height: auto; background: #fff; border: 1px solid var(--line);
  border-radius: .4rem; }
figcaption, .soft { color: var(--soft); font-size: .9rem; margin-top: .35rem; }
pre { background: var(--band); border: 1px solid var(--line); border-radius: .4rem; padding: .6rem .8rem;
  white-space: pre-wrap; font-size: .88rem; }
@media screen and (max-width: 40rem) { figure img.wide { width: 44rem; max-width: none; } }
@media print { :root { --text: #000; --soft: #333; --back: #fff; --line: #bbb; --band: #f4f4f4; --mark: #fff1c2; }
  body { max-width: none; padding: 0; font-size: 10pt; } nav { display: none; } h2, h3 { break-after: avoid; }
  tr { break-inside: avoid; } img { filter: none; } figure img { max-height: 8.8cm; width: auto; }
  .scroll { overflow: visible; } table { font-size: 8.5pt; } th, td { padding: .2rem .4rem; } td { min-width: 0; }
  .numbers th { white-space: normal; } }
"""


@dataclass(frozen=True)
class Attention:
    """Where a model attends in one image, and how sharply in a few."""

    image: Tensor  # (channels, height, width), in [0, 1]
    rows: list[BlockRow]  # one per block; entropies are means over all the images
    num_images: int


@dataclass(frozen=True)
class RunResult:
    """A run of any task, as the report takes it."""

    name: str  # such as "PolaFormer" or the recipe's name
    parameters: int
    terms: TaskTerms
    split: str  # that the record and the summary are for
    record: dict[str, Any]  # of the evaluation
    summary: dict[str, str]  # of the evaluation, formatted
    num_unreadable: int
    journal: list[dict[str, Any]]  # as polaformer.training.journal.read returns it
    settings: dict[str, Any]  # the recipe's fields
    figures: Mapping[str, Figure]  # from the task, by heading

    @cached_property
    def attention(self) -> Attention | None:
        """Where the model attends in a few images; None if the task provides no images or no layer has maps."""
        shown = [figure for figure in self.figures.values() if isinstance(figure, AttentionInputs)]
        return _attention(shown[0]) if shown else None

    @property
    def mean_entropy(self) -> float | None:
        """The entropy per attention row in nats, mean over blocks and streams; None if there is none."""
        found = [mean for row in self.attention.rows for mean in row.entropy.values()] if self.attention else []
        return fmean(found) if found else None


def write_report(path: Path, title: str, results: Sequence[RunResult], *, lead: str = "", command: str = "") -> None:
    """Writes the report of the runs to `path` atomically. Raises CannotWriteError.

    lead: a paragraph below the title. command: the command line of the run. Attention is not shown for layers whose maps have
    more than MAX_WEIGHTS entries. The same runs give the same file.
    """
    if not results:
        raise ValueError("write_report: there are no results; give at least one run")
    runs = _with_unique_names(results)
    headings = dict.fromkeys(heading for run in runs for heading in run.figures)
    sections = {
        "Results": _results(runs),
        "Learning curves": _curves(runs),
        **{heading: _per_run(runs, [_render(run, run.figures.get(heading)) for run in runs]) for heading in headings},
        **({"Attention entropy": _entropies(runs)} if any(run.attention for run in runs) else {}),
        "Settings": _settings(runs),
        "Command and environment": _environment(command),
    }
    with writing(path):
        write_atomically(path, _page(title, lead, sections))


def _page(title: str, lead: str, sections: Mapping[str, str]) -> str:
    anchors = {name: name.lower().replace(" ", "-") for name in sections}
    links = "".join(f'<a href="#{anchor}">{name}</a>' for name, anchor in anchors.items())
    body = "".join(f'<section id="{anchors[name]}"><h2>{name}</h2>{content}</section>\n' for name, content in sections.items())
    return (
        '<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{_text(title)}</title><style>{STYLE}</style></head>\n<body><header><h1>{_text(title)}</h1>"
        f"{f'<p>{_text(lead)}</p>' if lead else ''}<nav>{links}</nav></header>\n<main>{body}</main></body></html>\n"
    )


def _results(runs: Sequence[RunResult]) -> str:
    rows = [_result(run) for run in runs]
    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = _table(columns, [[row.get(name, "–") for name in columns] for row in rows], "numbers")
    unreadable, samples = max(run.num_unreadable for run in runs), max(run.record["samples"] for run in runs)
    left_out = f"; {unreadable} could not be read and were skipped" if unreadable else ""
    note = f"On {samples:,} {_split(runs[0])} {runs[0].terms.sample_noun}{left_out}. "
    if any(run.attention for run in runs):
        note += "Entropy: mean over blocks and streams; lower is sharper, uniform attention is 100 %."
    return table + f'<p class="soft">{_text(note)}</p>'


def _result(run: RunResult) -> dict[str, str]:
    training = journal_lines(run.journal, "train")
    seconds = [line["wall"]["seconds"] for line in run.journal if "wall" in line]
    found = {
        "run": run.name,
        "parameters": f"{run.parameters:,}",
        **{name: text for name, text in run.summary.items() if name != "loss"},  # shown in the learning curves
        "final training loss": f"{training[-1]['loss']:.3f}" if training else "–",
        "training time": _duration(seconds[-1]) if seconds else "–",
    }
    return found | ({"entropy": _entropy(run)} if run.attention else {})


def _split(run: RunResult) -> str:
    return "validation" if run.split == "val" else run.split


def _curves(runs: Sequence[RunResult]) -> str:
    metric = runs[0].terms.metric
    journals = {run.name: run.journal for run in runs}
    evaluations = {run.name: journal_lines(run.journal, "eval") for run in runs}
    ends = [f"{name} ends at {metric.text(found[-1][metric.name])}" for name, found in evaluations.items() if found]
    return _figure(
        training_figures.draw_learning_curves(journals, metric),
        f"Learning curves in three panels. Validation {metric.label}: {'; '.join(ends) or 'not in the journal'}.",
        "Left: training loss, averaged over the updates since the previous point. Middle and right: validation "
        f"{metric.label} against epochs and against training time (evaluation time is not counted).",
    )


def _render(run: RunResult, figure: Figure | None) -> str:
    """A figure from the task as HTML: an image, a table or a paragraph."""
    match figure:
        case Confusion():
            return _confusion(run, figure)
        case Predictions():
            return _predictions(figure)
        case AttentionInputs():
            return _maps(run)
        case Rows():
            caption = f'<p class="soft">{_text(figure.caption)}</p>' if figure.caption else ""
            return _table(figure.columns, figure.rows, "numbers" if figure.numeric else "") + caption
        case Pictures():
            return _pictures(figure)
        case Curves():
            return _lines(run, figure)
        case Text():
            return f"<p>{_text(figure.text)}</p>"
        case _:
            return "<p>Not available for this run.</p>"


def _confusion(run: RunResult, figure: Confusion) -> str:
    right, samples = int(figure.counts.trace()), int(figure.counts.sum())
    noun = figure.parts or run.terms.sample_noun
    about = f"{right:,} of {samples:,} {figure.split or _split(run)} {noun} are classified correctly."
    if len(figure.classes) > training_figures.MAX_CLASSES_IN_MATRIX:
        caption = f"The most frequently confused pairs, true class → predicted class. {about}"
    else:
        numbers = f" Numbers: % of the {noun} of the true class, from 1 % on." if figure.parts else ""
        caption = f"Rows: true class; columns: predicted class. Off-diagonal entries are errors.{numbers} {about}"
    drawn = training_figures.draw_confusion(figure.counts, figure.classes, in_percent=figure.parts is not None)
    return _figure(drawn, f"Confusion matrix of {run.name}. {about}", caption)


def _predictions(figure: Predictions) -> str:
    return _figure(
        training_figures.draw_predictions(figure.samples),
        f"Images, true class → predicted class (probability): {'; '.join(map(str, figure.samples))}.",
        "True class → predicted class (its probability), for images as the model sees them. Red ✗: wrong, at most "
        f"{figure.most_wrong} out of the {figure.searched} images searched; green ✓: correct.",
    )


def _pictures(figure: Pictures) -> str:
    rows = ""
    for row in figure.rows:
        shown = "".join(
            f'<figure><img src="{_jpeg(image)}" alt="{_text(f"{row.title}: {caption}")}" width="{image.width}" '
            f'height="{image.height}"><figcaption>{_text(caption)}</figcaption></figure>'
            for caption, image in row.pictures
        )
        rows += f'<p class="title">{_text(row.title)}</p><div class="pictures">{shown}</div>\n'
    return rows + (f'<p class="soft">{_text(figure.caption)}</p>' if figure.caption else "")


def _jpeg(image: Image) -> str:
    file = io.BytesIO()
    image.convert("RGB").save(file, "JPEG", quality=88, subsampling=0)  # full colour resolution, for thin coloured lines
    return f"data:image/jpeg;base64,{b64encode(file.getvalue()).decode()}"


def _lines(run: RunResult, figure: Curves) -> str:
    alt = f"{figure.y_label} against {figure.x_label} of {run.name}: {'; '.join(figure.lines)}."
    return _figure(training_figures.draw_lines(figure), alt, figure.caption)


def _maps(run: RunResult) -> str:
    attention = run.attention
    rows = [row for row in attention.rows if row.heatmaps] if attention else []
    if attention is None or not rows:
        return "<p>This model gives no attention maps that can be shown.</p>"
    streams = " Polarity attention has two maps: same-sign and opposite-sign."
    if not any("opposite" in row.heatmaps for row in rows):
        streams = ""
    return _figure(
        training_figures.draw_attention(attention.image, rows),
        f"Heatmaps of the attention of one patch of an image in {len(rows)} blocks.",
        "Where the patch marked □ attends, block by block; brighter means more attention. Mean over heads; each heatmap has "
        f"its own scale, from 0 to the maximum above it.{streams}",
    )


def _entropies(runs: Sequence[RunResult]) -> str:
    shown = {run.name: run.attention for run in runs if run.attention and run.mean_entropy is not None}
    if not shown:
        return "<p>No run has attention entropies.</p>"
    means = "; ".join(f"{run.name} {_entropy(run)}" for run in runs)
    num_images = min(attention.num_images for attention in shown.values())
    return _figure(
        training_figures.draw_entropies({name: attention.rows for name, attention in shown.items()}),
        f"Mean attention entropy of each block. Over all blocks: {means}.",
        "Positive sequence entropy (Eq. 7 of the paper) of an attention row, mean over heads, queries and "
        f"{'one image' if num_images == 1 else f'{num_images} images'}; lower is sharper. "
        "Dashed: ln M, the entropy of uniform attention over M keys.",
    )


def _settings(runs: Sequence[RunResult]) -> str:
    """One row per setting; for several runs, those that differ come first and are highlighted."""
    names = list(dict.fromkeys(name for run in runs for name in run.settings))
    values = {name: [_value(run.settings.get(name)) for run in runs] for name in names}
    differ = [name for name in names if len(set(values[name])) > 1]
    rows = [[f"≠ {name}", *values[name]] for name in differ] + [[n, *values[n]] for n in names if n not in differ]
    note = ""
    if len(runs) > 1:
        note = f'<p class="soft">{"Marked ≠: settings that differ." if differ else "All runs have the same settings."}</p>'
    return note + _table(["setting", *(run.name for run in runs)], rows, num_marked=len(differ))


def _environment(command: str) -> str:
    command_line = f"<pre>{_text(command)}</pre>" if command else ""
    about = {"polaformer": polaformer.__version__, **fingerprint()}
    return command_line + _table(["item", "value"], [[name.replace("_", " "), _value(value)] for name, value in about.items()])


def _per_run(runs: Sequence[RunResult], contents: Sequence[str]) -> str:
    """The contents one after another, each under the name of its run if there are several."""
    names = [f"<h3>{_text(run.name)}</h3>" if len(runs) > 1 else "" for run in runs]
    return "".join(name + content for name, content in zip(names, contents, strict=True))


def _figure(png: bytes, alt: str, caption: str) -> str:
    width, height = (int.from_bytes(png[start : start + 4], "big") for start in (16, 20))  # in the header of every PNG
    source = f"data:image/png;base64,{b64encode(png).decode()}"
    size = f'width="{2 * width // 3}" height="{2 * height // 3}"'  # drawn at 150 dots per inch, shown at 100
    wide = ' class="wide"' if width > 1000 else ""
    image = f'<img src="{source}" alt="{_text(alt)}" {size}{wide}>'
    return f'<figure><div class="scroll">{image}</div><figcaption>{_text(caption)}</figcaption></figure>'


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "", *, num_marked: int = 0) -> str:
    head = "".join(f'<th scope="col">{_text(name)}</th>' for name in header)
    body = ""
    for index, (first, *others) in enumerate(rows):
        marked = ' class="differs"' if index < num_marked else ""
        cells = "".join(f"<td>{_text(cell)}</td>" for cell in others)
        body += f'<tr{marked}><th scope="row">{_text(first)}</th>{cells}</tr>\n'
    return f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _text(value: str) -> str:
    """The string escaped for HTML, whatever bytes a name contains."""
    return escape(value.encode("utf-8", "backslashreplace").decode())


def _value(value: Any) -> str:
    if value is None or value == "":
        return "–"
    return ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.1f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 120 else f"{minutes // 60} h {minutes % 60:02d} min"


def _entropy(run: RunResult) -> str:
    """The mean entropy in nats, and as a percentage of that of uniform attention."""
    if run.attention is None or run.mean_entropy is None:
        return "–"
    shares = [mean / log(row.num_keys) for row in run.attention.rows for mean in row.entropy.values() if row.num_keys > 1]
    return f"{run.mean_entropy:.2f} nats" + (f" ({100 * fmean(shares):.0f} %)" if shares else "")


def _with_unique_names(results: Sequence[RunResult]) -> list[RunResult]:
    """The runs, with a number appended to a name that an earlier run has."""
    found: list[RunResult] = []
    for run in results:
        same = sum(run.name == other.name for other in results[: len(found)])
        found.append(replace(run, name=f"{run.name} ({same + 1})") if same else run)
    return found


def _attention(figure: AttentionInputs) -> Attention | None:
    """The attention on the images of a figure; on fewer of them if the maps are large."""
    position = _salient_position(figure.shown)
    attend = partial(visit_maps, figure.model, visit=partial(row_at, position=position), max_weights=MAX_WEIGHTS)
    rows = attend(images=figure.images[0][None])
    if not rows:
        return None
    others = figure.images[1 : max(1, MAX_TOTAL_WEIGHTS // sum(row.num_weights for row in rows))]
    of_all = [rows, *(attend(images=image[None]) for image in others)]
    means = [_mean_entropies(blocks) for blocks in zip(*of_all, strict=True)]
    return Attention(figure.shown, [replace(row, entropy=mean) for row, mean in zip(rows, means, strict=True)], len(of_all))


def _mean_entropies(blocks: Sequence[BlockRow]) -> dict[str, float]:
    """The entropies of one block, by stream, averaged over images."""
    streams = dict.fromkeys(stream for block in blocks for stream in block.entropy)
    return {stream: fmean(block.entropy[stream] for block in blocks if stream in block.entropy) for stream in streams}


def _salient_position(image: Tensor) -> tuple[float, float]:
    """The centre, as fractions of height and width, of the square that differs most from the image's median: the stroke."""
    side = max(1, min(image.shape[1:]) // 4)
    grey = image.mean(dim=0, keepdim=True)
    squares = (F.avg_pool2d(grey, side) - grey.median()).abs()[0]
    row, column = divmod(int(squares.argmax()), squares.shape[1])
    return (row + 0.5) * side / image.shape[1], (column + 0.5) * side / image.shape[2]
