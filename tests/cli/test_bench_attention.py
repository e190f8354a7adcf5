"""`bench attention` as a user runs it, at tiny sizes."""

import json
from pathlib import Path

import pytest

from commands import run
from polaformer.analysis.timing import MIN_ROUNDS, Timing

PNG = b"\x89PNG\r\n\x1a\n"
# One round: several may disagree, which gives code 75.
TINY = ["bench", "attention", "--lengths", "16", "32", "--heads", "2", "--width", "8", "--rounds", "1"]
FEW = ["--only", "pola", "skyformer", "synthesizer"]


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--lengths"], "--lengths is empty"),
        (["--lengths", "64"], "a slope needs at least two different lengths"),
        (["--lengths", "0", "64"], "batch, heads and tokens must be at least 1"),
        (["--width", "1"], "the head width between 2 and 1024"),
        (["--heads", "0"], "batch, heads and tokens must be at least 1"),
        (["--lengths", "64", "9999999999"], "give a smaller one"),
        (["--rounds", "0"], "--rounds is 0; give at least 1"),
        (["--seconds", "0"], "--seconds is 0.0; give a positive number"),
        (["--threads", "0"], "--threads is 0; give 1 to"),
        (["--figure", "attention.jpg"], "give the name of a PNG file"),
        (["--only", "nystrom", "polar"], "--only has 'polar'; did you mean 'pola'? choose among: angular, bigbird"),
        (["--without", "sofmax"], "--without has 'sofmax'; did you mean 'softmax'?"),
        (["--without", "softmax"], "--without has 'softmax', which the others are compared with; leave it in"),
        (["--only", "pola", "linear", "--without", "linear"], "--only and --without both have 'linear'"),
        (["--mode", "backward"], "forward"),
    ],
)
def test_a_bad_option_gives_code_2_before_any_work(
    options: list[str], told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    code, out, err = run(["bench", "attention", *options], capsys)
    assert code == 2
    assert told in " ".join(err.split())
    assert out == ""
    assert list(tmp_path.iterdir()) == []


def test_cuda_where_there_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is one")
    code, out, err = run([*TINY, "--device", "cuda"], capsys)
    assert (code, out) == (2, "")
    assert "PyTorch finds no CUDA device here" in err


def test_ratios_come_first_then_times_memory_and_the_machine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run([*TINY, *FEW, "--figure", "new/attention.png"], capsys)
    assert code == 0
    titles = (
        "Speed relative to softmax",
        "Milliseconds",
        "Memory, MiB",
        "bench memory",
        "Timings are for",
        "saved new/attention.png",
    )
    places = [out.index(title) for title in titles]
    assert places == sorted(places)
    rows = {cells[1].strip(): [cell.strip() for cell in cells[2:-1]] for cells in table(out, "Speed relative to softmax")}
    assert set(rows) == {"pola", "skyformer", "softmax", "synthesizer"}
    told = " ".join(out.split())
    assert f"the 95 % interval of the median over rounds, all rounds where there are fewer than {MIN_ROUNDS}" in told
    assert f"that it may have at N = 32, at 95 % for each pair; none for fewer than {MIN_ROUNDS} rounds" in told
    assert rows["softmax"] == ["", "1.00 (1–1)", "1.00 (1–1)", "quadratic", "exact", ""]  # one round gives no rank
    assert rows["skyformer"][3:] == ["linear", "for kernelized", "random"]
    assert rows["pola"][3:] == ["linear", "exact", ""]
    memory = {cells[1].strip(): cells[2].split("/") for cells in table(out, "Memory, MiB")}
    assert all(len(numbers) == 3 and all(float(one) >= 0 for one in numbers) for numbers in memory.values())
    assert (tmp_path / "new/attention.png").read_bytes().startswith(PNG)


def table(out: str, title: str) -> list[list[str]]:
    """The cells of the rows of a table, the outer borders among them."""
    lines = out[out.index(title) :].splitlines()
    end = next(place for place, line in enumerate(lines) if line.startswith("└"))
    return [line.split("│") for line in lines[:end] if line.startswith("│")]


def test_everything_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run([*TINY, *FEW, "--json", "--mode", "both", "--without", "angular"], capsys)
    result = json.loads(out)
    assert code == 0
    assert (result["command"], result["mode"], result["lengths"]) == ("bench attention", "both", [16, 32])
    assert result["machine"]["torch"]
    row = result["rows"]["skyformer"]
    assert row["correct"]
    assert (row["facts"]["cost"], row["facts"]["stochastic"], row["facts"]["approximates"]) == ("linear", True, "kernelized")
    assert set(row["slopes"]) == {"time", "forward", "both", "saved"}
    point = row["lengths"]["32"]
    assert point["time"]["median"] > 0
    assert point["speedup"] > 0
    assert min(point["forward_bytes"], point["both_bytes"], point["saved_bytes"]) > 0


@pytest.mark.parametrize(
    ("command", "baseline"),
    [
        ([*TINY, "--only", "pola"], "softmax"),
        (["bench", "op", "--shapes", "1,1,8,4", "--without", "compile", "cpu"], "polarity (published)"),
        (["bench", "model", "--models", "pola_pvt_v2_b0", "--sizes", "32", "--batch", "1"], "ours"),
    ],
)
def test_a_noisy_table_shows_no_number_says_what_to_do_and_gives_code_75(
    command: list[str], baseline: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def measure(calls, **settings):  # type: ignore[no-untyped-def]
        assert settings["baseline"] == baseline
        return {name: Timing((0.01, 0.02, 0.04, 0.01, 0.01) if name == baseline else (0.01,) * 5, 0.0) for name in calls}

    monkeypatch.setattr("polaformer.bench.runner.measure", measure)
    code, out, err = run(command, capsys)
    assert code == 75
    assert "too noisy: " in out
    assert "10.00" not in out
    told = " ".join(err.split())
    assert f" is too noisy: {baseline} ×4.00" in told
    assert "close other programs, or give more --rounds and --seconds" in told


def test_the_order_and_the_ranks_follow_the_ratios_at_the_longest_length(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from polaformer.bench import runner

    last = {"softmax": (0.1,), "pola": (0.001,), "linear": (0.002, 0.0021), "hydra": (0.0021, 0.002)}
    lengths = iter([last | {"pola": (0.5,)}, last])  # at the first length pola is the slowest

    def measure(calls, **_):  # type: ignore[no-untyped-def]
        return {name: Timing((samples * 15)[:15], 0.0) for name, samples in next(lengths).items() if name in calls}

    monkeypatch.setattr(runner, "measure", measure)
    code, out, _ = run([*TINY, "--only", "pola", "linear", "hydra"], capsys)
    assert code == 0
    found = [[cells[place].strip() for place in (1, 2, 4)] for cells in table(out, "Speed relative to softmax")]
    assert found[0] == ["pola", "1", "100.00 (100–100)"]
    assert sorted(found[1:3]) == [["hydra", "2–3", "47.62 (47.6–50)"], ["linear", "2–3", "50.00 (47.6–50)"]]
    assert found[3] == ["softmax", "4", "1.00 (1–1)"]
    assert ["pola", "500 (15)", "1 (15)"] in [[cell.strip() for cell in cells[1:4]] for cells in table(out, "Milliseconds")]


@pytest.mark.parametrize("noisy", [False, True])
def test_an_incorrect_mechanism_shows_no_number_and_gives_code_1_even_where_it_is_noisy(
    noisy: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from polaformer.bench import attention, runner

    samples = (0.01, 0.02) if noisy else (0.01, 0.01)
    monkeypatch.setattr(runner, "measure", lambda calls, **_: dict.fromkeys(calls, Timing(samples, 0.0)))
    monkeypatch.setattr(attention, "relative_error", lambda name, *_: 1e-3 if name == "pola" else 0.0)
    code, out, err = run([*TINY, "--only", "pola"], capsys)
    assert code == 1
    assert ("too noisy: softmax ×2.00" in " ".join(err.split())) == noisy
    rows = [line for line in out.splitlines() if line.startswith("│ pola")]
    assert len(rows) == 3
    assert all(line.count("incorrect") == 2 for line in rows)


def test_what_would_take_too_long_says_so_in_its_cell(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from polaformer.bench import attention

    def forecast(before: object, name: str, length: int, setup: object) -> str | None:
        return "would take about 99 s" if name == "pola" and length == 32 else None

    monkeypatch.setattr(attention, "forecast", forecast)
    code, out, _ = run([*TINY, "--only", "pola"], capsys)
    assert code == 0
    rows = [line for line in out.splitlines() if line.startswith("│ pola")]
    assert len(rows) == 3
    assert all(line.count("skipped: would take about 99 s") == 1 for line in rows)


def test_the_figure_has_a_place_for_every_mechanism_even_for_a_new_one() -> None:
    from polaformer.analysis.attention_figures import IN_ALL, grouped
    from polaformer.attention import names

    found = grouped([*names(), "brand new"])
    assert sorted([*IN_ALL, *(name for members in found.values() for name in members)]) == sorted([*names(), "brand new"])
    assert list(found.values())[-1][-1] == "brand new"
