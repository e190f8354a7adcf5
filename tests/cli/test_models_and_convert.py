"""`polaformer models` and `polaformer convert` end to end."""

import json
from pathlib import Path

import pytest
import torch

import hostile
import polaformer
from commands import run
from models import images, small
from polaformer.backbones.published import EXCEPTIONS, ROWS
from published import published_state_dict


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "150")


def test_models_shows_the_papers_numbers_beside_ours(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(["models", "pola_*_tiny"], capsys)
    assert code == 0
    rows = {line.split()[1]: line for line in out.splitlines() if line.startswith("│")}
    assert list(rows) == ["pola_deit_tiny", "pola_pvt_tiny", "pola_swin_tiny"]
    assert "LLSS" in rows["pola_swin_tiny"]
    for number in ("12.92", "2.26", "11.75 / 2.06", "12 / 2.0", "78.8"):
        assert number in rows["pola_pvt_tiny"]
    assert "1 of 3 printed rows are reproduced to the digit" in out
    assert f"[1] pola_pvt_tiny: {EXCEPTIONS['pola_pvt_tiny']}." in out


def test_models_as_json_prints_nothing_but_its_result(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(["models", "softmax_deit_tiny", "--json"], capsys)
    assert code == 0
    (record,) = json.loads(out)["models"]
    assert record["params"] == 5_717_416
    assert record["attention"] == ["softmax"]
    assert record["paper"]["top1"] == ROWS["softmax_deit_tiny"].top1
    assert record["paper"]["params_reproduced"] is True
    assert record["paper"]["why_not"] is None


def test_models_with_other_mechanisms_show_the_rows_of_table_1(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(["models", "--attention", "hydra", "focused"], capsys)
    assert code == 0
    rows = {tuple(line.split()[1:4:2]): line for line in out.splitlines() if line.startswith("│ pola")}
    assert list(rows) == [(m, a) for m in ("pola_deit_tiny", "pola_swin_tiny") for a in ("hydra", "focused")]
    for number in ("6.19", "1.14", "5.70 / 1.09", "6.1 / 1.1 [1]", "74.1"):
        assert number in rows["pola_deit_tiny", "focused"]
    assert "1 of 4 printed rows are reproduced to the digit" in out
    code, out, _ = run(["models", "pola_pvt_v2_b0", "--attention", "mobile", "linear", "--json"], capsys)
    printed, unprinted = json.loads(out)["models"]
    assert (printed["mechanism"], printed["paper"]["params_millions"], printed["paper"]["params_reproduced"]) == (
        "mobile",
        3.5,
        False,
    )
    assert "3.5 M matches neither count" in printed["paper"]["why_not"]
    assert "paper" not in unprinted


def test_models_with_all_mechanisms_give_a_record_for_each(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(["models", "pola_pvt_v2_b0", "--attention", "all", "--json"], capsys)
    assert code == 0
    records = {record["mechanism"]: record for record in json.loads(out)["models"]}
    assert sorted(records) == polaformer.attention.names()
    assert next(iter(records)) == "softmax"  # those of Table 1 first
    assert {record["name"] for record in records.values()} == {"pola_pvt_v2_b0"}
    assert all(record["params"] > 3e6 and record["macs"] > 4e8 for record in records.values())
    plain = records["linear"]["params"]
    assert records["hydra"]["params"] == plain < records["linformer"]["params"]
    assert records["mobile"]["paper"]["params_millions"] == 3.5


def test_models_with_an_unknown_mechanism_give_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(["models", "--attention", "hidra"], capsys)
    assert (code, out) == (2, "")
    assert "--attention has 'hidra'; did you mean 'hydra'? choose from all, angular" in " ".join(err.split())
    code, _, err = run(["models", "softmax_*", "--attention", "hydra"], capsys)
    assert code == 2
    assert "--attention needs pola_* models" in err


def test_models_that_match_nothing_give_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(["models", "resnet*"], capsys)
    assert (code, out) == (2, "")
    assert "no model matches 'resnet*'" in err


def test_a_wide_table_in_a_pipe_is_not_cut(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS")
    _, out, _ = run(["models", "softmax_swin_small_384"], capsys)
    assert "softmax_swin_small_384" in out
    assert "49.56 / 25.17" in out


def test_convert_recognises_the_authors_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source, target = tmp_path / "theirs.pth", tmp_path / "ours.safetensors"
    model = polaformer.create_model("pola_pvt_v2_b0", num_classes=3).eval()
    torch.save({"model": published_state_dict(model), "epoch": 299}, source)
    code, out, _ = run(["convert", source, target], capsys)
    assert code == 0
    assert "pola_pvt_v2_b0" in out
    again = polaformer.create_model("pola_pvt_v2_b0", num_classes=3, checkpoint=target).eval()
    model.load_state_dict(published_state_dict(model))
    x = images(1)
    assert torch.equal(again(x), model(x))
    code, _, err = run(["convert", target, target], capsys)
    assert code == 2
    assert "exists; give another name, or --overwrite" in err


def test_convert_resizes_to_the_model_that_is_asked_for(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    source, target = tmp_path / "small.pth", tmp_path / "large.safetensors"
    torch.save(polaformer.create_model("pola_deit_tiny", num_classes=2).state_dict(), source)
    code, out, _ = run(["convert", source, target, "--model", "pola_deit_tiny", "--img-size", "256", "--json"], capsys)
    assert code == 0
    result = json.loads(out)
    assert "pos_embed.rows: 14×14 → 16×16" in result["resized"]
    assert result["model"]["img_size"] == 256
    assert result["bytes"] == target.stat().st_size
    # The written file names its model.
    code, out, _ = run(["convert", target, tmp_path / "again.safetensors", "--json"], capsys)
    assert code == 0
    assert json.loads(out)["model"] == result["model"]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["{tmp}/none.pth", "{tmp}/out.safetensors"], 2, "there is no file"),
        (["{tmp}/small.pth", "{tmp}/out.pth"], 2, "give a name that ends in .safetensors"),
        (["{tmp}/small.pth", "{tmp}/none/out.safetensors"], 2, "there is no directory"),
        (
            ["{tmp}/small.pth", "{tmp}/out.safetensors"],
            65,
            "match none of our models exactly; name the model with --model",
        ),
        (["{tmp}/small.pth", "{tmp}/out.safetensors", "--model", "pola_pvt_tny"], 2, "did you mean 'pola_pvt_tiny'"),
        (["{tmp}/small.pth", "{tmp}/out.safetensors", "--model", "pola_pvt_tiny"], 65, "does not fit pola_pvt_tiny"),
        (["{tmp}/small.pth", "{tmp}/out.safetensors", "--model", "pola_pvt_tiny", "--img-size", "0"], 2, "--img-size is 0"),
        (["{tmp}/text.pth", "{tmp}/out.safetensors"], 65, "neither a safetensors file nor a complete torch.save file"),
        (["{tmp}/small.pth"], 2, "OUT"),
    ],
)
def test_what_cannot_be_converted_is_one_error_and_writes_nothing(
    arguments: list[str], code: int, message: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    torch.save(small("pola_pvt_tiny").state_dict(), tmp_path / "small.pth")
    (tmp_path / "text.pth").write_text("hello")
    given, out, err = run(["convert", *(argument.format(tmp=tmp_path) for argument in arguments)], capsys)
    assert (given, out) == (code, "")
    assert message in err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["small.pth", "text.pth"]


def test_a_file_of_another_model_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    torch.save(polaformer.create_model("softmax_deit_tiny", num_classes=2).state_dict(), tmp_path / "deit.pth")
    code, _, err = run(["convert", tmp_path / "deit.pth", tmp_path / "out.safetensors", "--model", "pola_deit_tiny"], capsys)
    assert code == 65
    assert err.rstrip().endswith("The file is a softmax_deit_tiny with 2 classes.")
    assert " more lines" in err
    assert len(err.splitlines()) < 50


@pytest.mark.parametrize("kind", hostile.BOMBS)
def test_a_bomb_is_one_error_of_convert_and_nothing_is_written(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hostile.BOMBS[kind](tmp_path / "bomb.pth", tmp_path / "mark")
    code, out, err = run(["convert", tmp_path / "bomb.pth", tmp_path / "out.safetensors", "--model", "pola_pvt_tiny"], capsys)
    assert (code, out) == (65, "")
    assert f"polaformer convert: {tmp_path / 'bomb.pth'} " in err
    assert [path.name for path in tmp_path.iterdir()] == ["bomb.pth"]
