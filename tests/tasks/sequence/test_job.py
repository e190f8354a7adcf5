"""Training, resuming, evaluating and predicting on sequences, on tiny data in the released forms."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image

import faults
from arena import RELEASED, from_documents
from commands import run as call
from commands import run_apart
from faults import Kill
from polaformer.data.sources.lra import listops
from polaformer.data.sources.lra.datasets import DATASETS, DatasetName
from polaformer.data.sources.lra.opening import find_dataset, open_sequences
from polaformer.errors import SettingsError
from polaformer.recipes.lra import RECIPES, build_recipe
from polaformer.tasks.accuracy import ClassificationCounts
from polaformer.tasks.running import prepare, train
from polaformer.tasks.sequence.data import Encoding, SequenceReader, pad
from polaformer.tasks.sequence.predictor import load_predictor
from polaformer.tasks.sequence.recipe import SequenceRecipe
from polaformer.training.optim import create_optimizer
from polaformer.training.schedules import values_at
from polaformer.training.timeline import Timeline

WORDS = {"negative": ["dull", "awful", "bad", "slow"], "positive": ["great", "fine", "superb", "moving"]}
EXPRESSIONS = ("[MAX 2 9 [MIN 4 7 ] 0 ]", "[MIN 1 8 3 ]", "[SM 5 6 [MED 1 2 8 ] ]", "[MED 4 4 9 ]")


def write_reviews(path: Path, num_train: int = 40, num_test: int = 12) -> Path:
    """Reviews as JSON lines, of very different lengths."""
    generator, lines = np.random.default_rng(0), []
    for split, number in (("train", num_train), ("test", num_test)):
        for index in range(number):
            label = index % 2
            words = generator.choice(WORDS["positive" if label else "negative"], size=int(generator.integers(1, 30)))
            lines.append(json.dumps({"split": split, "label": label, "text": " ".join(words)}))
    path.write_text("\n".join(lines) + "\n")
    return path


@pytest.fixture(scope="module")
def reviews(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_reviews(tmp_path_factory.mktemp("reviews") / "imdb.jsonl")


def tiny(data: Path, **changes) -> SequenceRecipe:
    small = {"dim": 8, "mlp_dim": 8, "kept": 200, "length": 256, "batch_size": 8, "accumulation": 2, "steps": 12}
    times = {
        "lr": 1e-2,
        "eval_sequences": 8,
        "warmup_steps": 3,
        "eval_every_steps": 5,
        "save_every": 5,
        "log_every": 3,
        "num_workers": 0,
    }
    return replace(build_recipe("text", "pola-a3"), data=str(data), **small | times | changes)


# ---- recipes ----


def test_there_is_a_recipe_for_every_task_and_mechanism():
    names = [recipe.name for recipe in RECIPES]
    assert len(names) == len(set(names)) == 5 * 24
    assert {"lra/text-pola-a3", "lra/listops-softmax", "lra/retrieval-pola-a7", "lra/image-hydra"} <= set(names)
    for recipe in RECIPES:
        assert replace(recipe, data="somewhere").problems() == []


@pytest.mark.parametrize(("dataset", "lr", "warmup"), [("text", 1e-4, 80), ("pathfinder", 5e-4, 312), ("retrieval", 2e-4, 800)])
def test_learning_rate_and_beta1_follow_the_published_one_cycle(dataset, lr, warmup):
    recipe = build_recipe(dataset, "softmax")
    timeline = Timeline(recipe, 1000)
    assert timeline.total == 50_000
    for step, rate, momentum in ((0, lr / 25, 0.95), (warmup - 1, lr, 0.85), (49_999, lr / 250_000, 0.95)):
        found = values_at(step, recipe, timeline)
        assert found.lr == pytest.approx(rate, rel=1e-9)
        assert found.momentum == pytest.approx(momentum, rel=1e-9)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_heads": 3}, "dim is 8, which num_heads, 3, does not divide"),
        ({"kept": 300}, "kept is 300, more than the 256 positions; give a larger length"),
        ({"kept": 0}, "kept is 0; give an integer ≥ 1"),
        ({"dropout": 1.0}, r"dropout is 1.0; give a number in \[0, 1\)"),
        ({"val_share": 0.0}, "val_share is 0.0"),
        ({"black": "kept"}, "black is 'kept', but text has no pixels"),
        ({"convolution": "grid"}, "convolution is 'grid', but text has no grid"),
        ({"attention_options": ("alpha",)}, "attention_options has 'alpha'; give NAME=VALUE"),
        ({"attention_options": ("alpha=-1",)}, "alpha is -1"),
        ({"attention_options": ("beta=1",)}, "'pola' does not take beta"),
        ({"attention_options": ("conv=deformable",)}, "deformable convolution"),
        ({"attention_options": ("reduction=2",)}, "reduction"),
        ({"attention_options": ("num_prefix_tokens=1",)}, "sequences have no prefix"),
        ({"attention": "polar"}, "unknown mechanism 'polar'; did you mean 'pola'"),
        (
            {"attention": "reformer", "attention_options": None, "trim": True},
            "trim is true, but results of attention 'reformer'",
        ),
        ({"dataset": "image", "kept": 900, "length": 1024}, "kept is 900, but every image of image has 1024 pixels"),
        ({"batch_size": 64, "accumulation": 1}, "batch_size is 64, but there are only 40 training sequences"),
        ({"best_from": 1.0}, "best_from is 1.0"),
        ({"optimizer_eps": 0.0}, "optimizer_eps is 0.0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(reviews, changes, message):
    with pytest.raises(SettingsError, match=message):
        tiny(reviews, **changes).job()


def test_recipes_without_data_say_how_to_get_them():
    for dataset in DATASETS:
        with pytest.raises(SettingsError, match="--data"):
            build_recipe(dataset, "softmax").job()


# ---- data ----


def test_ids_are_bytes_plus_one_cut_and_padded_with_zeros():
    split = from_documents([b"ab", b"abcdefgh", b""], [0, 1, 0], ("x", "y"), "made up")
    reader = SequenceReader(split, Encoding(kept=5, shift=1), length=7, trims=True)
    batch = reader.collate([reader.read(index) for index in range(3)], [0, 1, 2], [])
    assert batch.ids.tolist() == [[[98, 99, 0, 0, 0]], [[98, 99, 100, 101, 102]], [[0] * 5]]
    assert batch.labels.tolist() == [0, 1, 0]
    whole = SequenceReader(split, Encoding(kept=5, shift=1), length=7, trims=False)
    assert whole.collate([whole.read(0)], [0], []).ids.tolist() == [[[98, 99, 0, 0, 0, 0, 0]]]
    assert whole.collate([], [], []).ids.shape == (0, 1, 7)


def test_tokenisation_a_drops_the_closing_brackets():
    listops = find_dataset("listops")
    documents = [bytes(listops.parse(one)) for one in EXPRESSIONS]
    split = from_documents(documents, [0] * len(documents), listops.CLASSES, "made up")
    encoding = Encoding(kept=2000, shift=1, drops_closers=True)
    applied = encoding.applied(split)
    for index, text in enumerate(EXPRESSIONS):
        with_closers = text.count("]") + len(text.replace("]", " ").split())
        assert len(split.read(index)) == with_closers
        assert len(applied.read(index)) == with_closers - text.count("]")
        assert encoding.ids(split.read(index)).tolist() == encoding.ids(applied.read(index)).tolist()
        assert encoding.ids(split.read(index)).min() >= 1
    assert encoding.lengths(applied).tolist() == [len(applied.read(index)) for index in range(len(documents))]


def test_black_pixels_are_masked_or_kept():
    image = np.zeros(1024, dtype=np.uint8)
    image[[3, 700]] = 255, 7
    split = from_documents([image.tobytes()], [0], ("x", "y"), "made up")
    masked, kept = Encoding(kept=1024, shift=0), Encoding(kept=1024, shift=1)
    assert masked.lengths(split).tolist() == [701]
    assert kept.lengths(split).tolist() == [1024]
    assert (masked.ids(split.read(0)) != 0).sum() == 2
    assert (kept.ids(split.read(0)) != 0).all()
    assert pad([[masked.ids(split.read(0))]], 1).shape == (1, 1, 701)
    assert SequenceRecipe(dataset="image").vocabulary == 256
    assert SequenceRecipe(dataset="image", black="kept").vocabulary == 257


# ---- the job ----


def test_the_sequences_of_an_update_are_sorted_into_micro_batches(reviews):
    job = tiny(reviews, accumulation=4).job()
    batches = job.training_batches(0, 0, 1)
    parts = [next(batches) for _ in range(4)]
    lengths = [[int((row != 0).sum()) for row in part.ids[:, 0]] for part in parts]
    assert [one for part in lengths for one in part] == sorted(one for part in lengths for one in part)
    assert [part.ids.shape[2] for part in parts] == [max(part) for part in lengths]
    untrimmed = next(tiny(reviews, trim=False, accumulation=1).job().training_batches(0, 0, 1))
    assert untrimmed.ids.shape == (8, 1, 256)
    assert sorted(untrimmed.indices.tolist()) == sorted(index for part in parts for index in part.indices.tolist())


@pytest.mark.parametrize(("attention", "trims"), [("linear", True), ("reformer", False)])
def test_by_default_sequences_are_trimmed_where_that_changes_no_result(reviews, attention, trims):
    job = tiny(reviews, attention=attention, attention_options=None, accumulation=1).job()
    assert (next(job.training_batches(0, 0, 1)).ids.shape[2] < 256) is trims
    assert (job.order.lengths is not None) is trims


@pytest.mark.parametrize("attention", ["pola", "softmax", "linear", "kernelized", "cosformer", "hedgehog"])
def test_trimmed_training_equals_untrimmed_without_dropout(reviews, attention):
    """Section 10's mechanisms: the same weights after three updates, in float64."""
    options = ("alpha=3",) if attention == "pola" else None
    found = []
    for changes in ({"trim": True, "accumulation": 4}, {"trim": False, "accumulation": 1}):
        recipe = tiny(reviews, attention=attention, attention_options=options, dropout=0.0, precision="fp64", **changes)
        job, accelerator = prepare(recipe)
        from polaformer.training.engine import Engine

        engine = Engine(job.model, job.objective, recipe, job.steps_per_epoch, accelerator)
        batches = job.training_batches(0, 0, 1)
        for step in range(3):
            engine.update([next(batches) for _ in range(recipe.accumulation)], step)
        found.append(engine.inner.state_dict())
    for name, whole in found[0].items():
        assert torch.allclose(whole, found[1][name], rtol=0, atol=1e-10), name


def test_text_selects_on_the_test_set_as_published_or_on_held_out_training_data(reviews):
    published = tiny(reviews, eval_sequences=None).job().parts
    assert [len(published[name]) for name in ("train", "val", "test")] == [40, 12, 12]
    held_out = tiny(reviews, selection="held-out", val_share=0.25, eval_sequences=None).job().parts
    assert [len(held_out[name]) for name in ("train", "val", "test")] == [30, 10, 12]
    assert not set(held_out["train"].names) & set(held_out["val"].names)
    subset = tiny(reviews).job().parts["val"]
    assert len(subset) == 8
    lengths = subset.lengths()[:, 0]
    assert (np.diff(lengths) >= 0).all()


KILLS = {"update": ("pola", Kill("update", 7)), "eval": ("pola", Kill("eval", 1)), "save": ("pola", Kill("system call", 30))}
# Skyformer draws its landmarks in evaluations too.
KILLS["eval of a stochastic mechanism"] = ("skyformer", Kill("eval", 1))


@pytest.mark.parametrize("case", KILLS)
def test_resume_after_kill_is_bitwise_equal(reviews, tmp_path, case):
    attention, kill = KILLS[case]
    recipe = tiny(reviews, attention=attention, attention_options=None)
    assert faults.run(tmp_path / "whole", recipe) == [0]
    assert faults.run(tmp_path / "killed", recipe, kill=kill) != [0]
    assert faults.run(tmp_path / "killed", recipe) == [0]
    assert faults.outcome(tmp_path / "killed") == faults.outcome(tmp_path / "whole")


@pytest.mark.parametrize(
    ("values", "best_step"), [((90, 80, 70, 60, 50), None), ((90, 80, 95, 60, 50), 6), ((10, 20, 30, 60, 50), 8)]
)
def test_weights_before_best_from_are_not_kept_even_if_they_are_the_best(reviews, tmp_path, monkeypatch, values, best_step):
    """As published: the best value counts from the start, its weights only from a share of the updates on."""
    honest, made_up = ClassificationCounts.record, iter([*values, 0.0, 0.0])

    def record(self: ClassificationCounts) -> dict:
        return honest(self) | ({"accuracy": float(next(made_up))} if self.samples else {})

    monkeypatch.setattr(ClassificationCounts, "record", record)
    train(tiny(reviews, steps=10, eval_every_steps=2, best_from=0.3), tmp_path / "run", lambda event, record: None)
    lines = [json.loads(line) for line in (tmp_path / "run" / "journal.jsonl").read_text().splitlines()]
    assert {line.get("best_step") for line in lines if line["kind"] == "final"} == {best_step}


def test_the_optimiser_has_the_published_epsilon(reviews):
    recipe = tiny(reviews)
    optimizer = create_optimizer(recipe.job().model, recipe)
    assert {group["eps"] for group in optimizer.param_groups} == {1e-6}
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.0}


def test_selection_that_the_data_do_not_allow_is_refused(reviews, tmp_path):
    only = tmp_path / "train.jsonl"
    only.write_text("\n".join(line for line in reviews.read_text().splitlines() if '"train"' in line) + "\n")
    with pytest.raises(SettingsError, match="neither a validation nor a test split; pass --selection held-out"):
        tiny(only).job()
    assert len(tiny(only, selection="held-out", eval_sequences=None).job().parts["val"]) == 4


# ---- commands ----


@pytest.fixture(scope="module")
def run(reviews, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("run") / "text"
    options = ["--dim", "8", "--mlp-dim", "8", "--kept", "200", "--length", "256", "--batch-size", "8", "--steps", "30"]
    options += ["--warmup-steps", "3", "--lr", "0.03", "--eval-every-steps", "15", "--dropout", "0", "--accumulation", "2"]
    command = ["train", "lra/text-pola-a3", "--data", reviews, "--out", folder, *options]
    [(code, _, errors)] = run_apart(command, folder.parent)
    assert code == 0, errors
    return folder


def test_train_eval_and_predict(run, tmp_path, capsys):
    code, out, _ = call(["eval", "--checkpoint", run, "--split", "test", "--json"], capsys)
    assert code == 0
    assert json.loads(out)["result"]["samples"] == 12
    file = tmp_path / "review.txt"
    file.write_text("awful slow dull bad awful slow dull")
    code, out, _ = call(["predict", "great superb moving fine great", file, "--checkpoint", run, "--json"], capsys)
    assert code == 0
    answers = json.loads(out)["sequences"]
    assert [one["classes"][0]["name"] for one in answers] == ["positive", "negative"]
    assert all(0.5 <= one["classes"][0]["probability"] <= 1 for one in answers)


class Trained(NamedTuple):
    """A short run on a tiny dataset, and what `train` printed."""

    dataset: DatasetName
    data: Path
    folder: Path
    shown: str


@pytest.fixture(scope="module")
def trained(request, tmp_path_factory) -> Trained:
    """Of the dataset that the test is parametrised with."""
    root = tmp_path_factory.mktemp(request.param)
    data = RELEASED[request.param](root / "data")
    options = ["--dim", "8", "--mlp-dim", "8", "--batch-size", "4", "--steps", "2", "--warmup-steps", "1", "--lr", "0.03"]
    options += ["--eval-every-steps", "2"] + ["--kept", "100", "--length", "128"] * (not DATASETS[request.param].side)
    command = ["train", f"lra/{request.param}-pola-a3", "--data", data, "--out", root / "run", *options]
    [(code, shown, errors)] = run_apart(command, root)
    assert code == 0, errors
    return Trained(request.param, data, root / "run", shown)


def each(*datasets: DatasetName) -> pytest.MarkDecorator:
    """Parametrises `trained`. Besides Text, the subject of this file, Retrieval with its two documents stands for all."""
    marks = {name: () if name == "retrieval" else pytest.mark.long for name in datasets}
    return pytest.mark.parametrize("trained", [pytest.param(name, marks=marks[name]) for name in datasets], indirect=True)


def predicted(trained: Trained, inputs: Sequence[str | Path], capsys) -> list[list[float]]:
    """The probabilities that `predict` gives, in the order of the classes."""
    classes = DATASETS[trained.dataset].classes
    top = ["--top", len(classes), "--json"]
    code, out, errors = call(["predict", *inputs, "--checkpoint", trained.folder, *top], capsys)
    assert code == 0, errors
    answers = [{one["name"]: one["probability"] for one in answer["classes"]} for answer in json.loads(out)["sequences"]]
    assert all(set(answer) == set(classes) for answer in answers)
    return [[answer[name] for name in classes] for answer in answers]


@each("retrieval", "listops", "pathfinder", "image")
def test_every_task_is_trained_and_evaluated(trained, capsys):
    inputs = "INPUT INPUT" if trained.dataset == "retrieval" else "INPUT"
    assert f"try it: polaformer predict {inputs} --checkpoint {trained.folder}" in trained.shown
    splits = open_sequences(trained.data, trained.dataset)
    for split in ("val", "test"):
        code, out, _ = call(["eval", "--checkpoint", trained.folder, "--split", split, "--json"], capsys)
        assert code == 0
        assert json.loads(out)["result"]["samples"] == len(splits[split])
    code, out, _ = call(["eval", "--checkpoint", trained.folder, "--data", trained.data, "--split", "train", "--json"], capsys)
    assert (code, json.loads(out)["result"]["samples"]) == (0, len(splits["train"]))


@each("retrieval", "listops", "pathfinder", "image")
def test_predictions_are_those_of_the_model_for_the_samples_of_the_dataset(trained, tmp_path, capsys):
    """The symbols that `predict` reads from texts and files are those of the dataset."""
    predictor = load_predictor(trained.folder / "model.safetensors")
    split, inputs = open_sequences(trained.data, trained.dataset)["test"], list[str | Path]()
    for index in range(2):
        for which in range(split.num_documents):
            symbols, file = split.read(index, which), tmp_path / f"{index}-{which}"
            if DATASETS[trained.dataset].side:
                inputs.append(file.with_suffix(".png"))
                Image.fromarray(symbols.reshape(32, 32)).save(inputs[-1])
            else:
                is_expression = trained.dataset == "listops"
                text = " ".join(listops.SYMBOLS[one] for one in symbols) if is_expression else bytes(symbols).decode()
                file.write_text(text)
                inputs.append(text if index else file)
    wanted = [predictor.probabilities([split.read(index, which) for which in range(split.num_documents)]) for index in range(2)]
    assert np.allclose(predicted(trained, inputs, capsys), wanted, rtol=0, atol=1e-6)


@each("retrieval")
def test_swapped_documents_get_the_answer_for_the_swapped_pair(trained, capsys):
    """The features [u, v, u∘v, u − v] are not symmetric: the answer is that of [v, u, v∘u, v − u]."""
    model = load_predictor(trained.folder / "model.safetensors").model
    texts = ("a paper on attention", "another paper, on trees")
    with torch.inference_mode():
        u, v = (model.encode(torch.tensor([[byte + 1 for byte in text.encode()]])) for text in texts)
        features = [torch.cat([a, b, a * b, a - b], dim=-1) for a, b in ((u, v), (v, u))]
        wanted = [model.head(one)[0].softmax(dim=-1).tolist() for one in features]
    found = predicted(trained, [*texts, *reversed(texts)], capsys)
    assert np.allclose(found, wanted, rtol=0, atol=1e-6)
    assert not np.allclose(found[0], found[1], rtol=0, atol=1e-6)


@each("retrieval")
@pytest.mark.parametrize(("number", "told"), [(1, "1 input given,"), (3, "3 inputs given,")])
def test_an_odd_number_of_documents_is_refused(trained, number, told, capsys):
    code, out, errors = call(["predict", *(number * ["some text"]), "--checkpoint", trained.folder], capsys)
    assert (code, out) == (2, "")
    assert f"{told} but documents are compared in pairs; give an even number" in errors


@each("listops")
def test_the_malformed_expression_among_several_is_named(trained, capsys):
    given = ["[MAX 2 9 ]", "[MAX 2 12 ]", "[MIN 4 1 ]"]
    code, out, _ = call(["predict", *given, "--checkpoint", trained.folder, "--json"], capsys)
    assert code == 65
    found = json.loads(out)
    assert [one["input"] for one in found["sequences"]] == [given[0], given[2]]
    assert found["unreadable"][0].startswith("the expression '[MAX 2 12 ]' has '12' at character 8")


def test_training_tells_of_empty_images(tmp_path):
    data = RELEASED["pathfinder"](tmp_path / "data")
    lost = Path(open_sequences(data, "pathfinder")["val"].name(1))
    lost.write_bytes(b"")
    job = replace(build_recipe("pathfinder", "pola-a3"), data=str(data), dim=8, mlp_dim=8, batch_size=4).job()
    assert job.notices == [f"val: 1 × empty and left out, such as {lost}"]
    assert len(job.parts["val"]) == 3
    assert job.needs(4)["notices"] == job.notices[0]


def test_the_report_shows_confusion_and_examples(run):
    page = (run / "report.html").read_text()
    assert "Confusion" in page
    assert "Examples" in page
    assert "superb" in page
    assert "of 12 test sequences are classified correctly" in page


def test_weights_of_other_sequences_are_refused(run, tmp_path, capsys):
    damaged = tmp_path / "model.safetensors"
    content = (run / "model.safetensors").read_bytes()
    damaged.write_bytes(content.replace(b"drops_closers", b"drops_closerz"))
    code, _, errors = call(["predict", "great", "--checkpoint", damaged], capsys)
    assert code == 65
    assert "does not store how its model is built" in errors
