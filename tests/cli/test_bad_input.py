"""A bad input gives one clear error and its exit code, and changes nothing."""

import json
import os
import pickle
import shutil
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import save_file

import faults
from commands import run
from polaformer.tasks.running import train as train_recipe

USAGE, BAD_DATA, CANNOT_WRITE = 2, 65, 74
LONG = "a" * 300


class Payload:
    """Creates a file if it is ever unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return open, ("executed", "w")


# The directory that all commands run in: one tiny run, some data, and bad copies of both


def write_digits(root: Path, counts: dict[str, int]) -> None:
    """Digits 0 and 1, 8×8 pixels, in class folders."""
    with np.load("digits.npz") as file:
        images, labels = file["x_train"], file["y_train"]
    for part, number in counts.items():
        for label, name in enumerate(("zero", "one")):
            (root / part / name).mkdir(parents=True, exist_ok=True)
            for place in np.flatnonzero(labels == label)[:number]:
                Image.fromarray(np.roll(images[place], part == "val")).save(root / part / name / f"{place}.png")


def write_data() -> None:
    write_digits(Path("photos"), {"train": 12, "val": 2})
    for name, files in {
        "empty": [],
        "loose": ["1.png", "2.png"],
        "no-images": ["cat/notes.txt", "dog/notes.txt"],
        "one-class": [f"cat/{n}.png" for n in range(40)],
        "empty-class": [*(f"{name}/{n}.png" for name in ("cat", "dog") for n in range(40)), "mouse/notes.txt"],
        "other-val": ["train/cat/1.png", "train/dog/1.png", "val/cat/1.png", "val/ox/1.png"],
        "two-images": ["cat/2.png", "dog/2.png"],
        "mixed": ["cat/1.png", "dog/1.png", "more.tar"],
    }.items():
        Path(name).mkdir()
        for file in files:
            Path(name, file).parent.mkdir(parents=True, exist_ok=True)
            Path(name, file).write_bytes(b"")
    whole = Path("digits.npz").read_bytes()
    Path("cut.npz").write_bytes(whole[: len(whole) // 2])
    np.savez("pickle.npz", x_train=np.array([Payload()] * 2, dtype=object), y_train=[0, 1])
    np.savez("floats.npz", x_train=np.zeros((4, 8, 8)), y_train=[0, 1, 0, 1])
    np.savez("labels.npz", x_train=np.zeros((4, 8, 8), np.uint8), y_train=[0, 1, 0, -1])
    for mode, name in (("w", "whole.tar"), ("w:gz", "squeezed.tar")):
        with tarfile.open(name, mode) as archive:
            archive.add("photos")
    Path("cut.tar").write_bytes(Path("whole.tar").read_bytes()[:7000])
    Path("file.txt").write_text("hello", encoding="utf-8")


def write_images() -> None:
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (16, 16), dtype=np.uint8)).save("good.png")
    Path("text.png").write_text("hello", encoding="utf-8")
    Path("nothing.png").write_bytes(b"")
    Path("cut.png").write_bytes(Path("good.png").read_bytes()[:150])
    Path("link.png").symlink_to("gone")


def config(change: Callable[[dict[str, Any]], Any]) -> bytes:
    found = json.loads(Path("run/config.json").read_bytes())
    change(found)
    return json.dumps(found).encode()


def write_runs() -> None:
    """Runs with a damaged configuration, and with damaged checkpoints."""
    for name, content in {
        "cut": b"{",
        "empty": b"",
        "bytes": b"\xff\xfe\x00",
        "list": b"[]",
        "number": b"5",
        "deep": b"[" * 100_000,
        "no-version": config(lambda found: found.pop("version")),
        "version": config(lambda found: found.update(version=2)),
        "task": config(lambda found: found.update(task="translation")),
        "no-options": config(lambda found: found.pop("options")),
        "list-of-options": config(lambda found: found.update(options=[1])),
        "unknown": config(lambda found: found["options"].update(epoch=3)),
        "type": config(lambda found: found["options"].update(epochs="3")),
        "truth": config(lambda found: found["options"].update(epochs=True)),
        "range": config(lambda found: found["options"].update(epochs=-3)),
        "huge": config(lambda found: found["options"].update(lr=10**400)),
        "several": config(lambda found: found["options"].update(epochs=-3, lr="x", foo=1)),
        "model": config(lambda found: found["options"].update(model="pola_deit_tinny")),
        "data": config(lambda found: found["options"].update(data="gone.npz")),
    }.items():
        Path(f"config-{name}").mkdir()
        Path(f"config-{name}", "config.json").write_bytes(content)
    for name, spoil in {
        "all-damaged": lambda steps: [flip(step / "model.safetensors") for step in steps],
        "no-manifests": lambda steps: [(step / "manifest.json").unlink() for step in steps],
        "newest-damaged": lambda steps: flip(steps[-1] / "optimizer.safetensors"),
        "newest-cut": lambda steps: (steps[-1] / "state.json").write_bytes(b"{"),
    }.items():
        shutil.copytree("run", name)
        Path(name, "model.safetensors").unlink()
        spoil(sorted(Path(name, "checkpoints").iterdir()))
    shutil.copytree("run", "short-journal")
    Path("short-journal", "journal.jsonl").write_bytes(b"")
    shutil.copytree("run", "other-sizes")
    Path("other-sizes", "config.json").write_bytes(config(lambda found: found["options"].update(dims=[32])))


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def write_weights() -> None:
    """Weights files that were tampered with."""
    shutil.copy("run/model.safetensors", "weights.safetensors")
    with safe_open("weights.safetensors", "pt") as file:
        about, tensors = dict(file.metadata()), {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118, no dict
    preparation = json.loads(about["preprocessing"])
    first = next(iter(tensors))

    def write(name: str, changes: dict[str, str] | None = None, **other: torch.Tensor) -> None:
        save_file(tensors | other, f"{name}.safetensors", about | (changes or {}))

    def prepare(name: str, **changes: Any) -> None:
        write(name, {"preprocessing": json.dumps(preparation | changes)})

    write("few-classes", {"classes": '["a"]'})
    write("no-json", {"classes": "["})
    write("newer", {"version": "2"})
    write("not-finite", None, **{first: torch.full_like(tensors[first], float("nan"))})
    write("extra", None, extra=torch.ones(1))
    write("huge-model", {"model": json.dumps(json.loads(about["model"]) | {"dims": [10**9]})})
    prepare("huge-images", img_size=[10**6, 10**6])
    prepare("no-size", img_size=[0, 8])
    prepare("interpolation", interpolation="magic")
    prepare("channels", mean=[0.1, 0.2, 0.3], std=[1, 1, 1])
    prepare("mean", mean=["x"])
    save_file({"other": torch.ones(3)}, "no-model.safetensors")
    whole = Path("weights.safetensors").read_bytes()
    Path("cut.safetensors").write_bytes(whole[:-100])
    Path("cut-header.safetensors").write_bytes(whole[:50])
    Path("empty.safetensors").write_bytes(b"")
    Path("pickle.pth").write_bytes(pickle.dumps(Payload()))


@pytest.fixture(scope="module")
def workshop(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder, before = tmp_path_factory.mktemp("workshop"), Path.cwd()
    os.chdir(folder)
    try:
        faults.write_data(folder / "digits.npz")
        train_recipe(faults.tiny("digits.npz", epochs=1), Path("run"), lambda event, record: None)
        write_data()
        write_images()
        write_runs()
        write_weights()
        yield folder
    finally:
        os.chdir(before)


@pytest.fixture(autouse=True)
def _in_the_workshop(workshop: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workshop)
    monkeypatch.setenv("COLUMNS", "120")


def listing(root: Path) -> dict[str, tuple[int, bytes]]:
    """Everything in a directory, with modification times and contents."""
    return {
        str(path): (path.lstat().st_mtime_ns, path.read_bytes() if path.is_file() else b"") for path in sorted(root.rglob("*"))
    }


# Inputs that are rejected before any work


class Case(NamedTuple):
    """The arguments, the exit code, and strings that the error contains. by_parser: tyro words the error."""

    words: list[str]
    code: int
    told: list[str]
    by_parser: bool = False


def train(*more: str, **changes: Any) -> list[str]:
    """A small training run, with some options changed, added, or (None) left out."""
    options: dict[str, Any] = {"data": "digits.npz", "epochs": 1, "warmup_epochs": 0, "num_workers": 0, "dims": 16, "depths": 1}
    options |= {"batch_size": 16, "out": "new"} | changes
    given = {f"--{name.replace('_', '-')}": value for name, value in options.items() if value is not None}
    return ["train", "digits/pola-vit-tiny", *(word for pair in given.items() for word in map(str, pair)), *more]


def evaluate(*more: str, checkpoint: str = "run") -> list[str]:
    return ["eval", "--checkpoint", checkpoint, "--num-workers", "0", *more]


def predict(*more: str, image: str = "good.png", checkpoint: str = "run") -> list[str]:
    return ["predict", image, "--checkpoint", checkpoint, *more]


GIVE_DATA = "give a folder of class folders, a .tar, an .npz, hfds:FOLDER, or 'digits'"
TRAIN: dict[str, Case] = {
    "no recipe": Case(["train"], USAGE, ["no recipe given; choose one of: digits/pola-vit-tiny"]),
    "an option before the recipe": Case(
        ["train", "--epochs", "1"], USAGE, ["'--epochs' comes before the recipe; name the recipe first"]
    ),
    "an unknown recipe": Case(
        ["train", "digits/pola-vit-tinny"],
        USAGE,
        ["there is no recipe 'digits/pola-vit-tinny'; did you mean 'digits/pola-vit-tiny'?"],
    ),
    "an unknown option": Case(train(epoch=3), USAGE, ["there is no option --epoch; did you mean '--epochs'?"]),
    "a word alone": Case(
        ["train", "digits/pola-vit-tiny", "fast"], USAGE, ["unexpected argument 'fast'; options are --name VALUE"]
    ),
    "a word too many": Case(train("fast"), USAGE, ["--out is new fast; give a string"]),
    "an option twice": Case(train("--epochs", "2"), USAGE, ["--epochs is given twice"]),
    "an option without a value": Case(train("--seed"), USAGE, ["--seed is empty; give an integer"]),
    "several at once": Case(
        train(epochs=0, lr="x", batch_size=-2, hflip=3, optimiser="sgd"),
        USAGE,
        [
            "5 problems, and nothing was started:",
            "--lr is x; give a number",
            "epochs is 0",
            "batch_size is -2",
            "hflip is 3.0",
            "--optimiser",
        ],
    ),
    "half an epoch": Case(train(epochs=1.5), USAGE, ["--epochs is 1.5; give an integer"]),
    "a text as a number": Case(train(lr="fast"), USAGE, ["--lr is fast; give a number"]),
    "maybe": Case(train(compile="maybe"), USAGE, ["--compile is maybe; give true or false"]),
    "one number for two": Case(train(crop_scale=1), USAGE, ["--crop-scale is 1; give 2 numbers separated by spaces"]),
    "no epochs": Case(train(epochs=0), USAGE, ["epochs is 0; give an integer ≥ 1"]),
    "a negative seed": Case(train(seed=-1), USAGE, ["seed is -1; give an integer ≥ 0"]),
    "a huge seed": Case(train(seed=2**63), USAGE, ["give an integer < 2^63"]),
    "an infinite rate": Case(train(lr="1e400"), USAGE, ["lr is inf; give a number > 0"]),
    "a rate that is none": Case(train(lr="nan"), USAGE, ["lr is nan; give a number > 0"]),
    "no clipping at all": Case(train(clip_norm=0), USAGE, ["clip_norm is 0.0; give a number > 0, or None"]),
    "an average that never moves": Case(train(ema_decay=1), USAGE, ["ema_decay is 1.0; give a number in (0, 1)"]),
    "too few checkpoints": Case(train(keep=1), USAGE, ["keep is 1; give an integer ≥ 3"]),
    "negative workers": Case(train(num_workers=-1), USAGE, ["num_workers is -1; give an integer ≥ 0"]),
    "more than all": Case(train(hflip=1.5), USAGE, ["hflip is 1.5; give a number in [0, 1]"]),
    "all held out": Case(train(val_share=1), USAGE, ["val_share is 1.0; give a number in [0, 1)"]),
    "a crop backwards": Case(
        train("--crop-scale", "0.9", "0.1"), USAGE, ["crop_scale is 0.9 to 0.1; give two positive numbers"]
    ),
    "no width": Case(train(dims=0), USAGE, ["dims is (0,); give positive numbers, one per stage"]),
    "no pixels": Case(train(img_size=0), USAGE, ["img_size is 0; give an integer ≥ 1"]),
    "two channels": Case(
        train("--mean", "0.1", "0.2"), USAGE, ["mean is (0.1, 0.2) and std (0.376,); give three numbers each"]
    ),
    "a mean that is none": Case(train(mean="nan"), USAGE, ["mean is (nan,)"]),
    "a mean that is no number": Case(train(mean="nan"), USAGE, ["mean is (nan,)", "or one each, all finite, and std above 0"]),
    "an infinite deviation": Case(train(std="inf"), USAGE, ["std (inf,); give three numbers each, or one each, all finite"]),
    "a tiny deviation": Case(train(std="1e-300"), USAGE, ["std is (1e-300,)"]),
    "images beyond memory": Case(train(img_size=99999999), USAGE, ["train: img_size is (99999999, 99999999)"]),
    "a crop beyond memory": Case(train(crop_pct=1e-9), USAGE, ["train: img_size is (8, 8) and crop_pct 1e-09"]),
    "a hidden layer beyond memory": Case(train(mlp_ratios=1e9), USAGE, ["mlp_ratio"]),
    "a rate beyond the numbers": Case(train(lr=1e300, out="left-1"), USAGE, ["lr is 1e+300"]),
    "images of a rate beyond the numbers": Case(train(lr_images=10**400, out="left-2"), USAGE, ["lr_images"]),
    "data without a name": Case(train("--dry-run", data=""), BAD_DATA, ["there is no data without a name"]),
    "a dry run in half precision": Case(
        train("--dry-run", precision="fp16"), USAGE, ["precision is 'fp16', which needs a GPU"]
    ),
    "warm-up without end": Case(train(warmup_epochs=2), USAGE, ["warmup_epochs is 2, but there are only 1 epochs"]),
    "a rate that rises to the end": Case(
        train(min_lr=1), USAGE, ["lr is 0.003; it must not be below warmup_lr, 1e-05, or min_lr, 1"]
    ),
    "an odd batch to mix": Case(
        train(batch_size=15, mixup=0.5), USAGE, ["mixup and cutmix need an even number of images, not 15"]
    ),
    "an odd part to mix": Case(
        train(accumulation=16, cutmix=1), USAGE, ["mixup and cutmix need an even number of images, not 1"]
    ),
    "a batch larger than the data": Case(
        train(batch_size=161), USAGE, ["batch_size is 161, but there are only 160 training images"]
    ),
    "parts that do not divide": Case(
        train(accumulation=3), USAGE, ["batch_size is 16, which is not a multiple of accumulation, 3"]
    ),
    "fine-tuning without weights": Case(
        ["train", "imagenet/pola-swin-tiny-384"],
        USAGE,
        ["fine-tuning starts from weights; give a weights file with --checkpoint"],
    ),
    "an unknown model": Case(
        train(model="pola_deit_tinny"), USAGE, ["unknown model 'pola_deit_tinny'; did you mean 'pola_deit_tiny'?"]
    ),
    "an unknown mechanism": Case(
        train(attention="polar"), USAGE, ["unknown mechanism 'polar'; did you mean 'pola'? give one of angular, bigbird"]
    ),
    "an unknown optimiser": Case(train(optimizer="adamx"), USAGE, ["optimizer is 'adamx'; did you mean 'adamax'?"]),
    "an unknown augmentation": Case(train(auto_augment="rand-x9"), USAGE, ["auto_augment is 'rand-x9'"]),
    "an unknown policy": Case(train(auto_augment="magic"), USAGE, ["auto_augment is 'magic'", "rand-m9-mstd0.5-inc1"]),
    "an unknown precision": Case(train(precision="fp8"), USAGE, ["precision is 'fp8'; choose one of fp32, bf16, fp16, fp64"]),
    "an unknown interpolation": Case(train(interpolation="magic"), USAGE, ["interpolation is 'magic'; choose one of bicubic"]),
    "an unknown way to resize": Case(train(resize="longer"), USAGE, ["resize is 'longer'; choose one of square, shorter"]),
    "an unknown policy for bad images": Case(
        train(on_bad_image="ask"), USAGE, ["on_bad_image is 'ask'; choose one of error, skip"]
    ),
    "heads that do not fit": Case(train(num_heads=3), USAGE, ["dim 16 is not divisible by 3 heads"]),
    "too many stages": Case(train("--num-heads", "2", "2"), USAGE, ["num_heads is (2, 2), 2 value(s) for 1 stage(s)"]),
    "half precision without a GPU": Case(
        train(precision="fp16"), USAGE, ["precision is 'fp16', which needs a GPU, but there is none"]
    ),
    "a folder that is a run": Case(train(out="run"), USAGE, ["run is not empty; resume it with `polaformer resume run`"]),
    "a folder that is not empty": Case(train(out="photos"), USAGE, ["photos is not empty; give another directory with --out"]),
    "a folder that is a file": Case(train(out="file.txt"), USAGE, ["file.txt is not empty; give another directory with --out"]),
    "a dry run into a file": Case(train("--dry-run", out="file.txt"), USAGE, ["file.txt is not empty; give another directory"]),
    "a folder below a file": Case(train(out="file.txt/new"), CANNOT_WRITE, ["cannot write to file.txt/new: Not a directory"]),
    "a folder with too long a name": Case(train(out=LONG), CANNOT_WRITE, ["cannot write to aaa", "File name too long"]),
    "weights that are not there": Case(
        train(checkpoint="gone.safetensors"), BAD_DATA, ["gone.safetensors cannot be read: No such file"]
    ),
    "weights of another model": Case(train(checkpoint="no-model.safetensors"), BAD_DATA, ["does not fit pola_deit_tiny"]),
    "weights that are cut": Case(
        train(checkpoint="cut.safetensors"), BAD_DATA, ["cut.safetensors is not a complete safetensors file"]
    ),
    "weights that would run code": Case(
        train(checkpoint="pickle.pth"), BAD_DATA, ["pickle.pth is neither a safetensors file nor"]
    ),
}
DATA: dict[str, tuple[str, list[str]]] = {
    "not there": ("gone", ["there is no data gone; " + GIVE_DATA]),
    "a text": ("file.txt", ["file.txt is a file; " + GIVE_DATA]),
    "a name that is too long": (LONG, ["cannot be read: File name too long"]),
    "an empty folder": ("empty", ["empty has no class folders; put the images of each class into a separate folder"]),
    "loose images": ("loose", ["loose has no class folders (the images in it have no class)"]),
    "no images": ("no-images", ["no-images has class folders but no images in them"]),
    "one class": ("one-class", ["one-class has 1 class (cat); at least two are needed"]),
    "an empty class": ("empty-class", ["no training images of mouse; add some or remove the class"]),
    "other classes to validate": ("other-val", ["training and validation have different classes (dog, ox)"]),
    "too few to hold any out": ("two-images", ["there are no images to validate with", "--val-share"]),
    "folders and archives": ("mixed", ["mixed holds both .tar files and image folders"]),
    "half an array file": ("cut.npz", ["cut.npz is not a complete .npz of plain arrays", "write it again with numpy.savez"]),
    "arrays that would run code": ("pickle.npz", ["pickle.npz is not a complete .npz of plain arrays"]),
    "arrays of numbers with a point": ("floats.npz", ["x_train is float64 of shape (4, 8, 8); give uint8 of shape"]),
    "a negative label": ("labels.npz", ["give 4 integers ≥ 0"]),
    "half an archive": ("cut.tar", ["cut.tar is not a complete, uncompressed .tar", "write or fetch it again"]),
    "a compressed archive": ("squeezed.tar", ["squeezed.tar is not a complete, uncompressed .tar"]),
    "no Hugging Face folder": ("hfds:gone", ["there is no folder gone; download the dataset first"]),
}
DATA_CASES = {
    f"{command}: {name}": Case(words, BAD_DATA, told)
    for name, (data, told) in DATA.items()
    for command, words in (("train", train(data=data)), ("check", ["check", data]), ("eval", evaluate("--data", data)))
}
RESUME: dict[str, Case] = {
    "no run": Case(["resume"], USAGE, ["no run given"]),
    "an unknown option": Case(["resume", "run", "--epochs", "9"], USAGE, ["--epochs"]),
    "a text as a number": Case(["resume", "run", "--num-workers", "x"], USAGE, ["--num-workers"]),
    "a folder that is not there": Case(["resume", "gone"], BAD_DATA, ["gone does not exist; give a run directory"]),
    "a folder that is no run": Case(
        ["resume", "photos"], BAD_DATA, ["photos is not a run directory", "give the one `polaformer train` printed"]
    ),
    "a file": Case(["resume", "file.txt"], BAD_DATA, ["file.txt is not a run directory"]),
    "a name that is too long": Case(["resume", LONG], BAD_DATA, ["give a run directory"]),
    "negative workers": Case(["resume", "run", "--num-workers", "-1"], USAGE, ["num_workers is -1"]),
    "data that are not there": Case(["resume", "run", "--data", "gone"], BAD_DATA, ["there is no data gone; " + GIVE_DATA]),
    "other data": Case(["resume", "run", "--data", "photos"], BAD_DATA, ["the data are not those that run was started with"]),
    "nothing to replay": Case(["resume", "run", "--replay"], BAD_DATA, ["run has no saved batch of a diverged step"]),
    "all checkpoints damaged": Case(
        ["resume", "all-damaged"],
        BAD_DATA,
        ["no checkpoint can be used:", "step-000000010/model.safetensors is damaged: sha256 should be"],
    ),
    "no manifest": Case(["resume", "no-manifests"], BAD_DATA, ["no checkpoint can be used:", "manifest.json cannot be read"]),
    "a model of other sizes": Case(["resume", "other-sizes"], BAD_DATA, ["the checkpoint is not from this training run"]),
    "config: cut": Case(
        ["resume", "config-cut"], BAD_DATA, ["config-cut/config.json is damaged: Expecting property name", "restore it"]
    ),
    "config: empty": Case(["resume", "config-empty"], BAD_DATA, ["config.json is damaged: Expecting value"]),
    "config: bytes": Case(["resume", "config-bytes"], BAD_DATA, ["config.json is damaged: 'utf-16-le' codec can't decode"]),
    "config: a list": Case(["resume", "config-list"], BAD_DATA, ["config.json is damaged"]),
    "config: a number": Case(["resume", "config-number"], BAD_DATA, ["config.json is damaged"]),
    "config: too deep": Case(["resume", "config-deep"], BAD_DATA, ["config.json is damaged: maximum recursion depth exceeded"]),
    "config: no version": Case(["resume", "config-no-version"], BAD_DATA, ["config.json is damaged", "version"]),
    "config: another version": Case(["resume", "config-version"], BAD_DATA, ["it is from another version of polaformer"]),
    "config: another task": Case(["resume", "config-task"], BAD_DATA, ["there is no task 'translation'"]),
    "config: no options": Case(["resume", "config-no-options"], BAD_DATA, ["config.json is damaged", "options"]),
    "config: a list of options": Case(["resume", "config-list-of-options"], BAD_DATA, ["config.json is damaged"]),
    "config: an unknown field": Case(
        ["resume", "config-unknown"], BAD_DATA, ["there is no field 'epoch'; did you mean 'epochs'?"]
    ),
    "config: a wrong type": Case(["resume", "config-type"], BAD_DATA, ['epochs is "3"; give an integer']),
    "config: a truth value": Case(["resume", "config-truth"], BAD_DATA, ["epochs is true; give an integer"]),
    "config: out of range": Case(["resume", "config-range"], BAD_DATA, ["epochs is -3; give an integer ≥ 1"]),
    "config: a huge number": Case(["resume", "config-huge"], BAD_DATA, ["lr is "]),
    "config: several problems": Case(
        ["resume", "config-several"],
        BAD_DATA,
        ["3 problems", "there is no field 'foo'", "epochs is -3", 'lr is "x"; give a number'],
    ),
    "config: an unknown model": Case(["resume", "config-model"], USAGE, ["unknown model 'pola_deit_tinny'; did you mean"]),
    "config: no data": Case(["resume", "config-data"], BAD_DATA, ["there is no data gone.npz"]),
}
GIVE_WEIGHTS = "give a run, one of its checkpoints, or a weights file"
WEIGHTS: dict[str, tuple[str, int, list[str]]] = {
    "not there": ("gone", USAGE, ["gone does not exist; " + GIVE_WEIGHTS]),
    "a name that is too long": (LONG, USAGE, [GIVE_WEIGHTS]),
    "a folder": ("photos", BAD_DATA, ["photos is neither a run nor a checkpoint"]),
    "a run with damaged checkpoints": ("all-damaged", BAD_DATA, ["no checkpoint can be used", "is damaged: sha256 should be"]),
    "an image": ("good.png", BAD_DATA, ["good.png is neither a safetensors file nor a complete torch.save file"]),
    "empty": ("empty.safetensors", BAD_DATA, ["empty.safetensors is empty; fetch or write it again"]),
    "cut": ("cut.safetensors", BAD_DATA, ["cut.safetensors is not a complete safetensors file"]),
    "cut in its header": ("cut-header.safetensors", BAD_DATA, ["cut-header.safetensors is not a complete safetensors file"]),
    "no model": (
        "no-model.safetensors",
        BAD_DATA,
        ["no-model.safetensors does not contain a known model", "polaformer convert"],
    ),
    "of a newer version": ("newer.safetensors", BAD_DATA, ["is version '2' of our format, but this library reads '1'"]),
    "numbers that are not finite": (
        "not-finite.safetensors",
        BAD_DATA,
        ["not-finite.safetensors has weights that are not finite"],
    ),
    "a parameter too many": ("extra.safetensors", BAD_DATA, ["its parameters are not those of the model that it names"]),
    "a model beyond memory": ("huge-model.safetensors", BAD_DATA, ["its description of the model is invalid"]),
    "images beyond memory": ("huge-images.safetensors", BAD_DATA, ["are not valid (img_size is (1000000, 1000000)"]),
    "images without pixels": ("no-size.safetensors", BAD_DATA, ["img_size is (0, 8); give a height and a width"]),
    "an unknown interpolation": ("interpolation.safetensors", BAD_DATA, ["with 'magic'"]),
    "other channels": ("channels.safetensors", BAD_DATA, ["images have 3 channels, but the model takes 1"]),
    "a mean that is none": ("mean.safetensors", BAD_DATA, ["its metadata on classes or preprocessing are not valid"]),
    "too few names of classes": ("few-classes.safetensors", BAD_DATA, ["the class names are not 10 strings"]),
    "broken names of classes": ("no-json.safetensors", BAD_DATA, ["its metadata on classes or preprocessing are not valid"]),
    "what would run code": ("pickle.pth", BAD_DATA, ["pickle.pth is neither a safetensors file nor"]),
}
WEIGHTS_CASES = {
    f"{command}: {name}": Case(words, code, told)
    for name, (path, code, told) in WEIGHTS.items()
    for command, words in (
        ("predict", predict(checkpoint=path)),
        ("eval", evaluate("--data", "digits.npz", checkpoint=path)),
    )
}
EVAL: dict[str, Case] = {
    "no checkpoint": Case(["eval"], USAGE, ["--checkpoint"]),
    "an unknown option": Case(evaluate("--top", "5"), USAGE, ["--top"]),
    "an unknown part": Case(evaluate("--split", "test"), USAGE, ["--split"]),
    "an unknown precision": Case(evaluate("--precision", "fp8"), USAGE, ["--precision"]),
    "an unknown way to resize": Case(evaluate("--resize", "longer"), USAGE, ["--resize"]),
    "weights without data": Case(
        evaluate(checkpoint="weights.safetensors"), USAGE, ["weights.safetensors is not part of a run", "give one with --data"]
    ),
    "data of other classes": Case(
        evaluate("--data", "photos"), USAGE, ["the data have the 2 classes one, zero, the model has the 10 classes 0, 1, 2, …"]
    ),
    "no batch": Case(evaluate("--batch-size", "0"), USAGE, ["--batch-size is 0; give an integer ≥ 1"]),
    "negative workers": Case(evaluate("--num-workers", "-1"), USAGE, ["--num-workers is -1; give an integer ≥ 0"]),
    "no pixels": Case(evaluate("--img-size", "0"), USAGE, ["--img-size is 0; give an integer ≥ 1"]),
    "images beyond memory": Case(
        evaluate("--img-size", "100000"), USAGE, ["img_size is (100000, 100000)", "64,000,000 pixels"]
    ),
    "no crop": Case(evaluate("--crop-pct", "0"), USAGE, ["--crop-pct is 0.0; give a number in (0, 1]"]),
    "a crop beyond memory": Case(evaluate("--crop-pct", "1e-9"), USAGE, ["crop_pct 1e-09", "64,000,000 pixels"]),
    "all held out": Case(evaluate("--val-share", "1"), USAGE, ["--val-share is 1.0; give a number in [0, 1)"]),
    "several at once": Case(
        evaluate("--batch-size", "0", "--crop-pct", "2"), USAGE, ["--batch-size is 0; give", "--crop-pct is 2.0; give"]
    ),
    "half precision without a GPU": Case(evaluate("--precision", "fp16"), USAGE, ["which needs a GPU, but there is none"]),
    "a damaged configuration": Case(
        evaluate(checkpoint="config-cut"), BAD_DATA, ["config-cut is neither a run nor a checkpoint"]
    ),
}
PREDICT: dict[str, Case] = {
    "no images": Case(["predict", "--checkpoint", "run"], USAGE, ["no inputs given; name at least one file"]),
    "no checkpoint": Case(["predict", "good.png"], USAGE, ["--checkpoint"]),
    "no classes": Case(predict("--top", "0"), USAGE, ["--top is 0; give an integer ≥ 1"]),
    "a text as a number": Case(predict("--top", "many"), USAGE, ["--top"]),
    "an unknown option": Case(predict("--best", "3"), USAGE, ["--best"]),
}
CHECK: dict[str, Case] = {
    "no data": Case(["check"], USAGE, ["no data given"]),
    "data without a name": Case(["check", ""], BAD_DATA, ["there is no data without a name"]),
    "an unknown option": Case(["check", "photos", "--fix"], USAGE, ["--fix"]),
    "no threads": Case(["check", "photos", "--num-workers", "0"], USAGE, ["--num-workers is 0; give an integer from 1 to 256"]),
    "no manifest": Case(
        ["check", "photos", "--manifest", "gone.json"], USAGE, ["there is no manifest gone.json; write one with"]
    ),
    "a manifest with too long a name": Case(["check", "photos", "--manifest", LONG], USAGE, ["there is no manifest aaa"]),
    "a manifest that is none": Case(
        ["check", "photos", "--manifest", "good.png"], BAD_DATA, ["good.png is not a dataset manifest"]
    ),
    "a manifest that is there": Case(
        ["check", "photos", "--write-manifest", "file.txt"], USAGE, ["file.txt exists; give another name"]
    ),
    "a manifest below a file": Case(
        ["check", "photos", "--write-manifest", "file.txt/m.json"],
        CANNOT_WRITE,
        ["cannot write to file.txt/m.json: there is no directory"],
    ),
}
DEMO: dict[str, Case] = {
    "no epochs": Case(["demo", "--epochs", "0"], USAGE, ["--epochs is 0; give an integer from 1 to 10,000"]),
    "a negative seed": Case(["demo", "--seed", "-1"], USAGE, ["--seed is -1; give an integer from 0 to"]),
    "a text as a number": Case(["demo", "--epochs", "many"], USAGE, ["--epochs"], by_parser=True),
    "an unknown option": Case(["demo", "--epoch", "1"], USAGE, ["--epochs"], by_parser=True),
    "a folder that is a file": Case(
        ["demo", "--out", "file.txt"], CANNOT_WRITE, ["cannot write to --out file.txt: File exists"]
    ),
    "a folder below a file": Case(
        ["demo", "--out", "file.txt/x"], CANNOT_WRITE, ["cannot write to --out file.txt/x: Not a directory"]
    ),
    "a folder with too long a name": Case(
        ["demo", "--out", LONG], CANNOT_WRITE, ["cannot write to --out aaa", "File name too long"]
    ),
}
CASES = {
    f"{command}: {name}" if command else name: case
    for command, cases in {
        "train": TRAIN,
        "resume": RESUME,
        "eval": EVAL,
        "predict": PREDICT,
        "check": CHECK,
        "demo": DEMO,
        "": DATA_CASES | WEIGHTS_CASES,
    }.items()
    for name, case in cases.items()
}


def cases() -> list[Any]:
    def marks(name: str) -> Iterator[pytest.MarkDecorator]:
        if "half precision" in name:
            yield pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")

    return [pytest.param(case, id=name, marks=tuple(marks(name))) for name, case in CASES.items()]


@pytest.mark.timeout(30)
@pytest.mark.parametrize("case", cases())
def test_a_bad_input_is_one_error_with_its_exit_code_and_changes_nothing(
    case: Case, workshop: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = listing(workshop)
    code, out, err = run(case.words, capsys)
    assert (code, out) == (case.code, ""), err
    assert "Traceback" not in err
    for text in case.told:
        assert text in err
    if not case.by_parser:
        assert err.startswith(f"polaformer {case.words[0]}: ")
        assert err.count(f"polaformer {case.words[0]}: ") == 1
    assert listing(workshop) == before


def test_there_are_enough_cases_of_every_command() -> None:
    assert len(CASES) >= 80
    for command, least in {"train": 60, "resume": 20, "eval": 30, "predict": 20, "check": 20, "demo": 5}.items():
        assert sum(case.words[0] == command for case in CASES.values()) >= least


# Inputs that are found to be bad during the work


def damaged_photos(folder: Path) -> Path:
    """The path of a damaged image in a copy of the photos."""
    shutil.copytree("photos", folder / "photos")
    broken = sorted((folder / "photos" / "train" / "zero").iterdir())[3]
    broken.write_bytes(broken.read_bytes()[:60])
    return broken


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_image_that_is_damaged_ends_a_training_with_65_and_a_checkpoint_to_go_on_from(
    num_workers: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    broken, new = damaged_photos(tmp_path), tmp_path / "new"
    words = train(data=broken.parents[2], out=new, num_workers=num_workers, batch_size=4, epochs=2, save_every=100, seed=3)
    code, out, err = run(words, capsys)
    assert (code, out) == (BAD_DATA, "")
    assert err.startswith(f"polaformer train: {broken} is damaged: ")
    assert "fetch it again, or remove it from the data (the run is saved at step" in err
    assert "which also accepts --on-bad-image skip" in err
    assert len(err.splitlines()) == 1
    [step] = faults.saved_steps(new)
    assert 0 < step < 6
    shutil.copy(Path("photos", *broken.parts[-3:]), broken)
    code, _, err = run(["resume", str(new)], capsys)
    assert code == 0
    assert f"step {step} of 12" in err


def test_more_bad_images_than_are_allowed_end_a_training_with_65(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    broken, new = damaged_photos(tmp_path), tmp_path / "new"
    others = sorted(broken.parent.iterdir())[:2]
    for other in others:
        other.write_bytes(b"no image")
    words = train(data=broken.parents[2], out=new, batch_size=4, on_bad_image="skip", max_bad_share=0.01)
    code, out, err = run(words, capsys)
    assert (code, out) == (BAD_DATA, "")
    assert "images of this epoch could not be used, more than the 1 allowed (--max-bad-share)" in err
    assert str(others[0]) in err
    assert "Traceback" not in err


def test_an_image_that_is_damaged_ends_an_evaluation_with_65_or_is_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with np.load("digits.npz") as file:
        images, labels = file["x_train"], file["y_train"]
    for place in range(60):
        path = tmp_path / "digits" / "train" / str(labels[place]) / f"{place}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(images[place]).save(path)
    shutil.copytree(tmp_path / "digits" / "train", tmp_path / "digits" / "val")
    broken = sorted((tmp_path / "digits" / "val" / "3").iterdir())[0]
    broken.write_bytes(b"")
    before = listing(tmp_path)
    for num_workers in ("0", "1"):
        words = ["eval", "--checkpoint", "run", "--data", str(tmp_path / "digits"), "--num-workers", num_workers]
        code, out, err = run(words, capsys)
        assert (code, out) == (BAD_DATA, "")
        assert err.splitlines()[-1] == f"polaformer eval: {broken} is empty; fetch it again, or remove it from the data"
        assert "Traceback" not in err
    code, out, _ = run([*words, "--on-bad-image", "skip", "--json"], capsys)
    found = json.loads(out)
    assert (code, found["result"]["samples"], found["unreadable"]) == (0, 59, 1)
    assert found["unreadable_images"] == [f"{broken} is empty; fetch it again, or remove it from the data"]
    assert listing(tmp_path) == before


BAD_IMAGES = {
    "text.png": "text.png is not a readable image",
    "nothing.png": "nothing.png is empty",
    "cut.png": "cut.png is damaged",
    "link.png": "link.png cannot be read: No such file or directory",
    "gone.png": "gone.png cannot be read: No such file or directory",
    "photos": "photos cannot be read: it is not a regular file",
    "/dev/zero": "/dev/zero cannot be read: it is not a regular file",
    LONG: "cannot be read: File name too long",
}


def test_unreadable_images_are_named_and_the_others_are_predicted(workshop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = listing(workshop)
    code, out, err = run(["predict", *list(BAD_IMAGES)[:4], "good.png", *list(BAD_IMAGES)[4:], "--checkpoint", "run"], capsys)
    assert code == BAD_DATA
    assert "good.png" in out
    told = [line for line in err.splitlines() if line.startswith("polaformer predict: ")]
    assert len(told) == len(BAD_IMAGES)
    for line, text in zip(told, BAD_IMAGES.values(), strict=True):
        assert text in line
        assert line.endswith("remove it from the data")
    assert listing(workshop) == before


@pytest.mark.parametrize("name", BAD_IMAGES)
def test_one_unreadable_image_is_one_error(name: str, workshop: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(["predict", name, "--checkpoint", "run"], capsys)
    assert (code, out) == (BAD_DATA, "")
    assert err.splitlines()[-1].startswith("polaformer predict: ")
    assert BAD_IMAGES[name] in err
    code, out, err = run(["predict", name, "good.png", "--checkpoint", "run", "--json", "--top", "2"], capsys)
    found = json.loads(out)
    assert (code, [one["image"] for one in found["images"]], len(found["unreadable"])) == (BAD_DATA, ["good.png"], 1)
    assert BAD_IMAGES[name] in found["unreadable"][0]


@pytest.mark.parametrize("name", ["newest-damaged", "newest-cut"])
def test_a_damaged_newest_checkpoint_is_named_and_passed_over(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(name, tmp_path / "run")
    code, _, err = run(["resume", str(tmp_path / "run")], capsys)
    assert code == 0
    assert "step-000000010" in err.splitlines()[0]
    assert "is damaged" in err.splitlines()[0]
    assert "step-000000005, step 5 of 10" in err
    assert faults.outcome(tmp_path / "run")["shipped"] == faults.outcome(Path("run"))["shipped"]


def test_a_checkpoint_that_is_damaged_is_passed_over_by_predict_and_eval(
    workshop: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    before = listing(workshop)
    for words in (predict(checkpoint="newest-damaged"), evaluate(checkpoint="newest-damaged")):
        code, out, _ = run(words, capsys)
        assert code == 0
        assert out
    assert listing(workshop) == before


def test_a_journal_that_is_shorter_than_its_checkpoint_ends_resume_with_65(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(["resume", "short-journal"], capsys)
    assert (code, out) == (BAD_DATA, "")
    assert err.splitlines()[-1].startswith("polaformer resume: short-journal/journal.jsonl is shorter than when the checkpoint")
    assert "Traceback" not in err


def test_no_bad_input_was_ever_executed(workshop: Path) -> None:
    assert not (workshop / "executed").exists()
