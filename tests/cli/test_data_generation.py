"""`polaformer data listops` and `polaformer data pathfinder`: files, progress, tables and JSON; bad options before any work."""

import json
from pathlib import Path

import pytest

from arena import RELEASED
from commands import run

LISTOPS = ["data", "listops", "--train", "30", "--val", "5", "--test", "5", "--workers", "1"]
PATHFINDER = ["data", "pathfinder", "--images", "30", "--contour-length", "4", "--workers", "1"]


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


@pytest.mark.parametrize(
    ("arguments", "file", "rows"),
    [
        (LISTOPS, "basic_train.tsv", ["samples", "classes, 9", "length without closers, mean", "root operator rule"]),
        (PATHFINDER, "curv_contour_length_4/metadata/0.npy", ["samples", "classes, connected", "visible percent, sd"]),
    ],
)
def test_data_are_generated_and_their_statistics_printed(
    arguments: list[str], file: str, rows: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run([*arguments, "--out", tmp_path / "out"], capsys)
    assert code == 0
    assert (tmp_path / "out" / file).is_file()
    assert (tmp_path / "out" / "manifest.json").is_file()
    assert all(f"│ {row} " in out for row in rows)
    assert "train" in out
    assert "generating" in err
    assert "checking" in err
    assert run([*arguments, "--out", tmp_path / "out"], capsys)[:2] == (0, out)


@pytest.mark.parametrize("arguments", [LISTOPS, PATHFINDER])
def test_json_is_the_manifest_and_nothing_else(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run([*arguments, "--json", "--out", tmp_path / "out"], capsys)
    assert code == 0
    result = json.loads(out)
    assert result.pop("command") == " ".join(arguments[:2])
    assert result.pop("out") == str(tmp_path / "out")
    assert result == json.loads((tmp_path / "out" / "manifest.json").read_text())


@pytest.mark.parametrize("arguments", [LISTOPS, PATHFINDER])
def test_other_options_give_code_2_unless_the_data_may_be_replaced(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*arguments, "--out", tmp_path], capsys)[0] == 0
    code, out, err = run([*arguments, "--seed", "1", "--out", tmp_path], capsys)
    assert (code, out) == (2, "")
    assert "has other data (seed 0); give the same options to resume, another directory with --out, or --overwrite" in err
    assert run([*arguments, "--seed", "1", "--out", tmp_path, "--overwrite"], capsys)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([*LISTOPS, "--train", "0"], "--train is 0; give an integer ≥ 1"),
        ([*LISTOPS, "--val", "-3"], "--val is -3; give an integer ≥ 1"),
        ([*LISTOPS, "--seed", "-1"], "--seed is -1; give an integer ≥ 0"),
        ([*LISTOPS, "--workers", "0"], "--workers is 0; give an integer from 1 to 256"),
        ([*LISTOPS, "--trian", "5"], "--train"),
        ([*PATHFINDER, "--images", "9"], "--images is 9; give an integer ≥ 10"),
        ([*PATHFINDER, "--contour-length", "2"], "--contour-length is 2; give an integer from 3 to 22"),
        ([*PATHFINDER, "--contour-length", "23"], "--contour-length is 23; give an integer from 3 to 22"),
        ([*PATHFINDER, "--contour-length", "long"], "--contour-length"),
    ],
)
def test_a_bad_option_gives_code_2_before_any_work(
    arguments: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run([*arguments, "--out", tmp_path / "out"], capsys)
    assert (code, out) == (2, "")
    assert told in err
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["listops", "--train", "5", "--seed", "7"], "leave out --seed, --train, or released"),
        (["pathfinder", "--contour-length", "9"], "leave out --contour-length, or released"),
        (["pathfinder", "--workers", "1"], "leave out --workers, or released"),
    ],
)
def test_options_of_the_generator_are_refused_when_data_are_converted(
    arguments: list[str], told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    dataset, *options = arguments
    RELEASED[dataset](Path("released"))
    code, out, err = run(["data", dataset, "released", *options, "--out", "out"], capsys)
    assert (code, out) == (2, "")
    assert f"released is converted, so that nothing is generated; {told}" in err
    assert not Path("out").exists()
    assert run(["data", dataset, "released", "--out", "out", "--json", "--overwrite"], capsys)[0] == 0


@pytest.mark.parametrize("arguments", [LISTOPS, PATHFINDER])
def test_a_directory_is_required_and_must_be_writable_and_empty(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = run(arguments, capsys)
    assert code == 2
    assert "--out" in err
    (tmp_path / "file").write_text("")
    code, _, err = run([*arguments, "--out", tmp_path / "file"], capsys)
    assert code == 74
    assert f"cannot write to --out {tmp_path / 'file'}" in err
    code, _, err = run([*arguments, "--out", tmp_path], capsys)
    assert code == 2
    assert "is not empty, and was not generated; give another directory with --out" in err
