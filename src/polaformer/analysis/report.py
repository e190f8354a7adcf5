"""The report of one or several trainings: one HTML file that needs nothing else, to read, print or send."""

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
from torch import Tensor

import polaformer
from polaformer.analysis import training_figures
from polaformer.analysis.attention_maps import BlockRow, row_at, visit_maps
from polaformer.analysis.training_figures import lines
from polaformer.bench.machine import fingerprint
from polaformer.regular_files import write_atomically, writing
from polaformer.tasks.figures import AttentionInputs, Confusion, Figure, Predictions, Rows, Text
from polaformer.training.metric import TaskTerms

MOST_WEIGHTS = 50_000_000  # entries of one map: 200 MB
ENOUGH_WEIGHTS = 100_000_000  # entries of the maps of all images: some seconds

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
    """Where a model looks in one image, and how sharply in a few."""

    image: Tensor  # (channels, height, width), between 0 and 1
    rows: list[BlockRow]  # a block each; their entropies are means over all the images
    num_images: int


@dataclass(frozen=True)
class RunResult:
    """A run that is reported, of any task."""

    name: str  # "PolaFormer", "softmax twin", or the recipe's
    parameters: int
    terms: TaskTerms
    split: str  # what the record and the summary are of
    record: dict[str, Any]  # of the counts
    summary: dict[str, str]  # likewise, for people
    num_unreadable: int
    journal: list[dict[str, Any]]  # as polaformer.training.journal.read returns it
    settings: dict[str, Any]  # the recipe's fields
    figures: Mapping[str, Figure]  # what the task wants to be seen, by heading

    @cached_property
    def attention(self) -> Attention | None:
        """What the model looks at in a few images; None if the task shows none, or no layer has maps."""
        shown = [figure for figure in self.figures.values() if isinstance(figure, AttentionInputs)]
        return _attention(shown[0]) if shown else None

    @property
    def mean_entropy(self) -> float | None:
        """The entropy of a row of attention in nats, mean over blocks and streams; None where there is none."""
        found = [mean for row in self.attention.rows for mean in row.entropy.values()] if self.attention else []
        return fmean(found) if found else None


def write_report(path: Path, title: str, results: Sequence[RunResult], *, lead: str = "", command: str = "") -> None:
    """Writes the report of the runs to `path`; it appears whole or not at all. Raises CannotWriteError.

    lead: a paragraph below the title. command: what was typed. Layers with maps of more than MOST_WEIGHTS entries are left out
    of attention. The same runs give the same file.
    """
    if not results:
        raise ValueError("write_report: there are no results; give at least one run")
    runs = _named_apart(results)
    headings = dict.fromkeys(heading for run in runs for heading in run.figures)
    sections = {
        "Results": _results(runs),
        "Learning curves": _curves(runs),
        **{heading: _each(runs, [_drawn(run, run.figures.get(heading)) for run in runs]) for heading in headings},
        **({"Entropy of attention": _entropies(runs)} if any(run.attention for run in runs) else {}),
        "Settings": _settings(runs),
        "How it was made": _making(command),
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
    left_out = f"; {unreadable} could not be read and are left out" if unreadable else ""
    note = f"On {samples:,} {_split(runs[0])} {runs[0].terms.sample_noun}{left_out}. "
    if any(run.attention for run in runs):
        note += "Entropy: mean over blocks and streams; less is sharper, uniform attention is 100 %."
    return table + f'<p class="soft">{_text(note)}</p>'


def _result(run: RunResult) -> dict[str, str]:
    training = lines(run.journal, "train")
    seconds = [line["wall"]["seconds"] for line in run.journal if "wall" in line]
    found = {
        "run": run.name,
        "parameters": f"{run.parameters:,}",
        **{name: text for name, text in run.summary.items() if name != "loss"},  # the curves show it
        "last training loss": f"{training[-1]['loss']:.3f}" if training else "–",
        "training time": _duration(seconds[-1]) if seconds else "–",
    }
    return found | ({"entropy": _entropy(run)} if run.attention else {})


def _split(run: RunResult) -> str:
    return "validation" if run.split == "val" else run.split


def _curves(runs: Sequence[RunResult]) -> str:
    metric = runs[0].terms.metric
    journals = {run.name: run.journal for run in runs}
    found = {run.name: lines(run.journal, "eval") for run in runs}
    ends = [f"{name} ends at {metric.text(of[-1][metric.name])}" for name, of in found.items() if of]
    return _figure(
        training_figures.draw_learning_curves(journals, metric),
        f"Three panels of curves. Validation {metric.label}: {'; '.join(ends) or 'not in the journal'}.",
        "Left: the training loss, mean of the updates since the point before. Middle and right: the validation "
        f"{metric.label}, after so many epochs, and after so much time of training (evaluations are not counted).",
    )


def _drawn(run: RunResult, figure: Figure | None) -> str:
    """What a task wants to be seen, as a picture, a table or a paragraph."""
    match figure:
        case Confusion():
            return _confusion(run, figure)
        case Predictions():
            return _predictions(figure)
        case AttentionInputs():
            return _maps(run)
        case Rows():
            caption = f'<p class="soft">{_text(figure.caption)}</p>' if figure.caption else ""
            return _table(figure.columns, figure.rows) + caption
        case Text():
            return f"<p>{_text(figure.text)}</p>"
        case _:
            return "<p>This run has none.</p>"


def _confusion(run: RunResult, figure: Confusion) -> str:
    right, samples = int(figure.counts.trace()), int(figure.counts.sum())
    about = f"{right:,} of {samples:,} {_split(run)} {run.terms.sample_noun} are right."
    if len(figure.classes) > training_figures.MOST_IN_MATRIX:
        caption = f"The pairs most often confused, true class → predicted class. {about}"
    else:
        caption = f"A row is a true class, a column what it was taken for; what lies off the diagonal is wrong. {about}"
    return _figure(training_figures.draw_confusion(figure.counts, figure.classes), f"Confusion of {run.name}. {about}", caption)


def _predictions(figure: Predictions) -> str:
    return _figure(
        training_figures.draw_predictions(figure.samples),
        f"Images, true class → predicted class (probability): {'; '.join(map(str, figure.samples))}.",
        "True class → predicted class (its probability), for images as the model sees them: red ✗ are wrong, at "
        f"most {figure.most_wrong}, looked for among {figure.searched} images; green ✓ are right.",
    )


def _maps(run: RunResult) -> str:
    look = run.attention
    rows = [row for row in look.rows if row.pictures] if look else []
    if look is None or not rows:
        return "<p>This model gives no attention maps that can be shown.</p>"
    two = " Polarity attention has two maps, of products of the same sign and of opposite signs."
    if not any("opposite" in row.pictures for row in rows):
        two = ""
    return _figure(
        training_figures.draw_attention(look.image, rows),
        f"The attention of one patch of an image in {len(rows)} blocks, as pictures.",
        "Where the patch marked □ looks, block by block: the brighter, the more attention. Mean over heads; each picture has "
        f"its own scale, from 0 to the weight above it.{two}",
    )


def _entropies(runs: Sequence[RunResult]) -> str:
    shown = {run.name: run.attention for run in runs if run.attention and run.mean_entropy is not None}
    if not shown:
        return "<p>No run gives attention maps.</p>"
    means = "; ".join(f"{run.name} {_entropy(run)}" for run in runs)
    num_images = min(look.num_images for look in shown.values())
    return _figure(
        training_figures.draw_entropies({name: look.rows for name, look in shown.items()}),
        f"Mean entropy of attention in each block. Over all blocks: {means}.",
        "Positive sequence entropy (Eq. 7 of the paper) of a row of attention, mean over heads, queries and "
        f"{'one image' if num_images == 1 else f'{num_images} images'}: the lower, the sharper. "
        "Dashed: ln M, where attention is spread evenly over all M keys.",
    )


def _settings(runs: Sequence[RunResult]) -> str:
    """A row a field; of several runs, those that differ first and highlighted."""
    names = list(dict.fromkeys(name for run in runs for name in run.settings))
    values = {name: [_value(run.settings.get(name)) for run in runs] for name in names}
    differ = [name for name in names if len(set(values[name])) > 1]
    rows = [[f"≠ {name}", *values[name]] for name in differ] + [[n, *values[n]] for n in names if n not in differ]
    note = ""
    if len(runs) > 1:
        note = f'<p class="soft">{"Highlighted with ≠: what differs." if differ else "All runs have the same settings."}</p>'
    return note + _table(["setting", *(run.name for run in runs)], rows, num_marked=len(differ))


def _making(command: str) -> str:
    typed = f"<pre>{_text(command)}</pre>" if command else ""
    about = {"polaformer": polaformer.__version__, **fingerprint()}
    return typed + _table(["what", "which"], [[name.replace("_", " "), _value(value)] for name, value in about.items()])


def _each(runs: Sequence[RunResult], contents: Sequence[str]) -> str:
    """What there is of each run, under its name where there are several."""
    names = [f"<h3>{_text(run.name)}</h3>" if len(runs) > 1 else "" for run in runs]
    return "".join(name + content for name, content in zip(names, contents, strict=True))


def _figure(png: bytes, alt: str, caption: str) -> str:
    width, height = (int.from_bytes(png[start : start + 4], "big") for start in (16, 20))  # in the header of every PNG
    source = f"data:image/png;base64,{b64encode(png).decode()}"
    size = f'width="{2 * width // 3}" height="{2 * height // 3}"'  # drawn at 150 dots an inch, shown at 100
    wide = ' class="wide"' if width > 1000 else ""
    image = f'<img src="{source}" alt="{_text(alt)}" {size}{wide}>'
    return f'<figure><div class="scroll">{image}</div><figcaption>{_text(caption)}</figcaption></figure>'


def _table(header: Sequence[str], rows: Sequence[Sequence[str]], kind: str = "", *, num_marked: int = 0) -> str:
    head = "".join(f'<th scope="col">{_text(name)}</th>' for name in header)
    body = ""
    for place, (first, *others) in enumerate(rows):
        marked = ' class="differs"' if place < num_marked else ""
        cells = "".join(f"<td>{_text(cell)}</td>" for cell in others)
        body += f'<tr{marked}><th scope="row">{_text(first)}</th>{cells}</tr>\n'
    return f'<div class="scroll"><table class="{kind}"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _text(value: str) -> str:
    """Text that HTML takes for nothing but text, whatever bytes a name had."""
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
    """In nats, and as a share of that of uniform attention."""
    if run.attention is None or run.mean_entropy is None:
        return "–"
    shares = [mean / log(row.num_keys) for row in run.attention.rows for mean in row.entropy.values() if row.num_keys > 1]
    return f"{run.mean_entropy:.2f} nats" + (f" ({100 * fmean(shares):.0f} %)" if shares else "")


def _named_apart(results: Sequence[RunResult]) -> list[RunResult]:
    """The runs, with a number after a name that another one before has."""
    found: list[RunResult] = []
    for run in results:
        same = sum(run.name == other.name for other in results[: len(found)])
        found.append(replace(run, name=f"{run.name} ({same + 1})") if same else run)
    return found


def _attention(figure: AttentionInputs) -> Attention | None:
    """Of fewer images where maps are large."""
    place = _striking_place(figure.shown)
    look = partial(visit_maps, figure.model, visit=partial(row_at, place=place), most_weights=MOST_WEIGHTS)
    rows = look(images=figure.images[0][None])
    if not rows:
        return None
    others = figure.images[1 : max(1, ENOUGH_WEIGHTS // sum(row.num_weights for row in rows))]
    of_all = [rows, *(look(images=image[None]) for image in others)]
    means = [_entropy_of_all(blocks) for blocks in zip(*of_all, strict=True)]
    return Attention(figure.shown, [replace(row, entropy=mean) for row, mean in zip(rows, means, strict=True)], len(of_all))


def _entropy_of_all(blocks: Sequence[BlockRow]) -> dict[str, float]:
    """The mean over images of the entropies of one block."""
    streams = dict.fromkeys(stream for block in blocks for stream in block.entropy)
    return {stream: fmean(block.entropy[stream] for block in blocks if stream in block.entropy) for stream in streams}


def _striking_place(image: Tensor) -> tuple[float, float]:
    """The middle (from the top, from the left; shares) of the square that differs most from the image's median: the stroke."""
    side = max(1, min(image.shape[1:]) // 4)
    grey = image.mean(dim=0, keepdim=True)
    squares = (F.avg_pool2d(grey, side) - grey.median()).abs()[0]
    row, column = divmod(int(squares.argmax()), squares.shape[1])
    return (row + 0.5) * side / image.shape[1], (column + 0.5) * side / image.shape[2]
