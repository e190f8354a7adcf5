"""`bench op --lengths`, `bench model`, `bench memory` and `env` as a user runs them, at tiny sizes."""

import json
import sys
from pathlib import Path

import pytest

from commands import run

PNG = b"\x89PNG\r\n\x1a\n"
# One round: several may disagree, which gives code 75.
LENGTHS = [
    "bench",
    "op",
    "--lengths",
    "16",
    "32",
    "--heads",
    "2",
    "--width",
    "8",
    "--rounds",
    "1",
]
MODEL = ["bench", "model", "--models", "pola_pvt_v2_b0", "--sizes", "32", "--batch", "1", "--rounds", "1"]
MEMORY = ["bench", "memory", "--shapes", "1,1,64,8", "--without", "cpu", "compile", "torch", "linear", "SDPA"]


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["bench", "op", "--figure", "time.png"], "--figure time.png draws time against the number of tokens; give --lengths"),
        (["bench", "op", "--lengths", "8"], "a slope needs at least two different lengths"),
        (["bench", "op", "--lengths", "0", "8"], "makes '1,4,0,32'; batch, heads and tokens must be at least 1"),
        (["bench", "op", "--lengths", "8", "16", "--width", "1"], "the head width between 2 and 1024"),
        (["bench", "op", "--lengths", "8", "16", "--shapes", "1,1,8,4"], "--shapes and --lengths were both given"),
        (["bench", "op", "--lengths", "8", "16", "--figure", "time.jpg"], "give the name of a PNG file"),
        (
            ["bench", "op", "--without", "sofmax"],
            "--without has 'sofmax', which is not part of any name; did you mean 'softmax'?",
        ),
        (["bench", "op", "--without", "published"], "is what the others are compared with; leave it in"),
        (["bench", "op", "--device", "tpu"], "cpu"),
        (["bench", "model", "--models", "pola_swin_tinny"], "did you mean 'pola_swin_tiny'?"),
        (["bench", "model", "--models", "softmax_swin_tiny"], "--models has 'softmax_swin_tiny'"),
        (["bench", "model", "--models"], "--models is empty"),
        (["bench", "model", "--sizes", "225"], "--sizes has 225; give multiples of 32 from 32"),
        (["bench", "model", "--sizes"], "--sizes is empty"),
        (["bench", "model", "--batch", "0"], "--batch is 0; give at least 1"),
        (["bench", "model", "--rounds", "0"], "--rounds is 0; give at least 1"),
        (["bench", "model", "--figure", "images.png"], "give two or more --sizes"),
        (["bench", "memory", "--shapes", "1,1,8"], "--shapes has '1,1,8'; give four integers"),
        (["bench", "memory", "--seconds", "0"], "--seconds is 0.0; give a positive number"),
        (["bench", "memory", "--figure", "memory.png"], "give --lengths too"),
        (["bench", "memory", "--threads", "0"], "--threads is 0; give 1 to"),
    ],
)
def test_a_bad_option_gives_code_2_before_any_work(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, err = run(arguments, capsys)
    assert code == 2
    assert told in " ".join(err.split())
    assert out == ""
    assert list(tmp_path.iterdir()) == []


def test_cuda_where_there_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    for command in (LENGTHS, MODEL, MEMORY):
        code, out, err = run([*command, "--device", "cuda"], capsys)
        assert (code, out) == (2, "")
        assert "PyTorch finds no CUDA device here" in err


def test_a_figure_without_matplotlib_is_refused_before_any_work(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, _, err = run([*LENGTHS, "--figure", "time.png"], capsys)
    assert code == 2
    assert 'matplotlib not installed; run: pip install "polaformer[train]"' in err


def test_lengths_show_growth_first_and_draw_a_figure(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run([*LENGTHS, "--figure", "new/time.png"], capsys)
    assert code == 0
    places = [out.index(text) for text in ("Growth of time", "slope", "Milliseconds", "Timings are for", "saved new/time.png")]
    assert places == sorted(places)
    assert "torch.compile" not in out
    assert (tmp_path / "new/time.png").read_bytes().startswith(PNG)


def test_lengths_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run([*LENGTHS, "--json", "--mode", "both"], capsys)
    result = json.loads(out)
    assert code == 0
    assert result["lengths"] == [16, 32]
    row = result["rows"]["polarity (published)"]
    assert row["correct"]
    assert len(row["per_doubling"]) == 1
    assert row["times"]["32"]["rounds"] == 1


def test_softmax_that_would_take_too_long_is_skipped_and_the_others_are_not(capsys: pytest.CaptureFixture[str]) -> None:
    wanted = ["--shapes", "1,1,262144,8", "--rounds", "1", "--seconds", "3", "--without", "compile", "torch", "cpu", "triton"]
    code, out, _ = run(["bench", "op", *wanted, "--json"], capsys)
    rows = json.loads(out)["shapes"][0]["rows"]
    assert code == 0
    assert rows["softmax (SDPA)"]["skipped"].startswith("would take about")
    assert rows["linear (ELU + 1)"]["median"] > 0


def test_models_show_ratios_first_and_draw_a_figure(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run([*MODEL, "--sizes", "32", "64", "--mode", "train", "--figure", "images.png"], capsys)
    assert code == 0
    titles = (
        "Speed of ours relative to each",
        "pola_pvt_v2_b0 at 32 pixels",
        "at 64 pixels",
        "Timings are for",
        "random (seed 0)",
    )
    places = [out.index(title) for title in titles]
    assert places == sorted(places)
    assert "timm pvt_v2_b0" in out
    assert "saved (MiB)" in out
    assert (tmp_path / "images.png").read_bytes().startswith(PNG)


def test_models_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run([*MODEL, "--json"], capsys)
    (record,) = json.loads(out)["models"]
    assert code == 0
    assert (record["model"], record["size"]) == ("pola_pvt_v2_b0", 32)
    assert list(record["rows"]) == ["ours", "published form", "softmax twin", "timm pvt_v2_b0"]
    assert record["rows"]["ours"]["logits_error"] < 1e-4
    assert all(row["images_per_second"] > 0 and row["speedup"] > 0 for row in record["rows"].values())


def test_memory_shows_ratios_first_and_a_dead_process_in_its_place(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from polaformer.bench import memory
    from polaformer.bench.runner import Measurement

    measured = memory.probe

    def probe(name, *question, **options):  # type: ignore[no-untyped-def]
        return Measurement(skipped="out of memory") if "materialised" in name else measured(name, *question, **options)

    monkeypatch.setattr(memory, "probe", probe)
    code, out, _ = run(MEMORY, capsys)
    assert code == 0
    places = [out.index(text) for text in ("relative to the published form", "Shape 1,1,64,8, MiB", "Measured on")]
    assert places == sorted(places)
    rows = [line for line in out.splitlines() if line.startswith("│ softmax (materialised)")]
    assert len(rows) == 2
    assert all("out of memory" in row for row in rows)


def test_memory_by_length_draws_a_figure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from polaformer.bench import memory
    from polaformer.bench.runner import Measurement

    def probe(name, shape, *_, **__):  # type: ignore[no-untyped-def]
        sizes = {name: shape[2] * n for n, name in enumerate(memory.SIZES)}
        return Measurement(1e-7, sizes=sizes)

    monkeypatch.setattr(memory, "probe", probe)
    code, out, _ = run(["bench", "memory", "--lengths", "64", "128", "--figure", "memory.png", "--json"], capsys)
    assert code == 0
    assert json.loads(out)["shapes"][1]["rows"]["softmax (materialised)"]["saved"] == 128
    assert (tmp_path / "memory.png").read_bytes().startswith(PNG)


def test_the_environment_names_backends_versions_and_machine(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(["env"], capsys)
    assert code == 0
    for text in ("Backends", "torch", "cpu", "triton", "timm", "datasets", "C++ compiler", "kernel cache", "devices"):
        assert text in out
    for text in ("kernel of polarity attention", "kernel of convolution and gate"):
        assert text in out
    assert str(Path.home()) not in out or str(Path.home()) == "/"


def test_the_environment_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(["env", "--json"], capsys)
    found = json.loads(out)
    assert code == 0
    assert found["backends"]["torch"]["works"]
    assert found["versions"]["torch"]
    assert found["machine"]["cpu"]
    assert all(set(kernel) == {"works", "reason", "options"} for kernel in found["kernels"].values())
    assert set(found["bfloat16_on_cpu"]) == {"works", "reason"}


def test_the_environment_answers_when_everything_is_broken(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from polaformer.analysis import machine
    from polaformer.ops.polarity import triton

    monkeypatch.setattr(triton, "unavailable_reason", lambda: 1 / 0)
    monkeypatch.setattr(machine, "installed", lambda _: None)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("POLAFORMER_CACHE", "/dev/null/kernels")
    code, out, _ = run(["env"], capsys)
    assert code == 0
    assert "none found; install g++ or clang++" in out
    assert "none: " in out
    assert 'not installed: pip install "polaformer[train]"' in out
    assert out.count("ZeroDivisionError: division by zero") == 3
    assert "plain PyTorch" in out
