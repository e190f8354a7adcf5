"""The output of the commands: nothing from a file reaches the terminal unescaped."""

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from rich.progress import Progress

import polaformer
from commands import run
from pictures import content, write_folder
from polaformer.backbones import CheckpointError, create_model, save_checkpoint
from polaformer.cli.errors import UsageError
from polaformer.cli.output import ProgressText, Terminal, new_table, print_all, print_json, print_line
from polaformer.cli.training_view import TrainingView
from polaformer.data.audit import FORMAT
from polaformer.data.transforms import Preprocessing
from polaformer.errors import DataError, SettingsError
from polaformer.tasks.classification.predictor import classifier_metadata
from polaformer.tasks.classification.recipe import ClassificationRecipe

# Clears the screen, sets a colour (C1), reverses the text direction, returns the carriage; and rich's markup and emoji.
HOSTILE = "a\x1b[2Jb\x9b31mc\u202ed\re\x7f[bold]f[/bold]:warning:"
SHOWN = r"a\x1b[2Jb\x9b31mc\u202ed\re\x7f[bold]f[/bold]:warning:"


def assert_harmless(text: str) -> None:
    assert all(line.isprintable() for line in text.split("\n")), ascii(text)


def test_lines_tables_and_progress_show_what_a_terminal_would_obey(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    table = new_table(HOSTILE, HOSTILE, caption=HOSTILE)
    table.add_row(HOSTILE)
    print_all(HOSTILE, table)
    print_line(HOSTILE, stderr=True)
    view = TrainingView(HOSTILE, ClassificationRecipe(batch_size=1, epochs=1))
    view("note", {"text": HOSTILE})
    view("bad samples", {"samples": [HOSTILE]})
    captured = capsys.readouterr()
    assert (captured.out.count(SHOWN), captured.err.count(SHOWN)) == (5, 3)
    assert_harmless(captured.out + captured.err)
    # Borders stay straight: escaped characters count when columns are measured.
    assert len({len(line) for line in captured.out.split("\n") if line.startswith(("┃", "│"))}) == 1
    terminal = Terminal(width=200)
    terminal.file = io.StringIO()
    with Progress(ProgressText("{task.description}"), console=terminal) as bar:
        bar.add_task(HOSTILE, total=1)
    assert SHOWN in terminal.file.getvalue()
    assert_harmless(terminal.file.getvalue())


def test_json_escapes_what_a_terminal_would_obey_and_stays_the_same_json(capsys: pytest.CaptureFixture[str]) -> None:
    names = [HOSTILE, "größe 1 → 2", "\U000e0041", "\udcff"]
    print_json({"names": names})
    out = capsys.readouterr().out
    assert_harmless(out)
    assert "größe 1 → 2" in out
    assert json.loads(out) == {"names": names}


def test_names_of_classes_files_and_parameters_are_printed_escaped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = "a\x1b[2Jb\u202e\x9bc"
    files = {f"{part}/{folder}/{n}.png": content(n) for n, part in enumerate(("train", "val")) for folder in (name, "dog")}
    write_folder(tmp_path / "photos", files)
    (tmp_path / "photos" / "train" / "dog" / f"{name}.png").write_bytes(b"")
    (tmp_path / f"{name}.pth").write_bytes(b"no checkpoint")
    for words in (
        ["check", "photos"],
        ["check", f"photos/train/{name}"],
        ["check", "photos", name],  # an extra argument, which the parser repeats
        ["predict", "x.png", "--checkpoint", f"{name}.pth"],
        ["convert", f"{name}.pth", "out.safetensors"],
    ):
        code, out, err = run(words, capsys)
        assert code in (2, 65)
        assert r"a\x1b[2Jb\u202e\x9bc" in out + err, words
        assert_harmless(out + err)


FORGED = "a\n\nFORGED: nothing is wrong\x1b[2J"
AS_ONE_LINE = r"a\n\nFORGED: nothing is wrong\x1b[2J"


def test_names_cannot_begin_new_lines_in_what_the_commands_print(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "500")  # cells are not wrapped
    files = {f"{part}/{folder}/{n}.png": content(n) for n, part in enumerate(("train", "val")) for folder in (FORGED, "dog")}
    write_folder(tmp_path / "photos", files)
    write_folder(tmp_path / FORGED, {"cat/notes.txt": b""})
    (tmp_path / "empty" / FORGED).mkdir(parents=True)
    np.savez(tmp_path / f"{FORGED}.npz", x_train=np.zeros(3))
    (tmp_path / f"{FORGED}.tar").write_bytes(b"?")
    (tmp_path / f"{FORGED}.pth").write_bytes(b"no checkpoint")
    (tmp_path / "manifest.json").write_text(json.dumps({"format": FORMAT, "sha256": {f"train/{FORGED}": ""}}))
    (tmp_path / f"{FORGED}.json").write_text("{}")
    for words in (
        ["check", "photos"],  # a class name in a table
        ["check", "photos", "--manifest", "manifest.json"],
        ["check", "photos", "--manifest", f"{FORGED}.json"],
        ["check", "photos", "--manifest", FORGED],
        ["check", FORGED],
        ["check", f"empty/{FORGED}"],
        ["check", f"{FORGED}.npz"],
        ["check", f"{FORGED}.tar"],
        ["check", f"hfds:{FORGED}x"],
        ["check", "photos", FORGED],  # an extra argument, which the parser repeats
        ["convert", f"{FORGED}.pth", "out.safetensors"],
        ["predict", "x.png", "--checkpoint", f"{FORGED}.pth"],
        ["train", FORGED],
        ["train", "digits/pola-vit-tiny", "--data", FORGED, "--dry-run"],
    ):
        out, err = run(words, capsys)[1:]
        assert AS_ONE_LINE in out + err, words
        assert all(AS_ONE_LINE in line for line in (out + err).split("\n") if "FORGED" in line), words
        assert_harmless(out + err)


def test_messages_are_one_line_for_each_thing_that_is_wrong() -> None:
    assert str(DataError(f"{FORGED} is damaged")) == f"{AS_ONE_LINE} is damaged"
    assert str(DataError("two files:", f"  {FORGED}", "  b")).split("\n") == ["two files:", f"  {AS_ONE_LINE}", "  b"]
    assert str(SettingsError([FORGED, "b"])).split("\n")[1:] == [f"  {AS_ONE_LINE}", "  b"]
    assert str(CheckpointError(f"{FORGED} is empty")) == f"{AS_ONE_LINE} is empty"
    assert str(UsageError(FORGED)) == AS_ONE_LINE


def test_what_a_weights_file_says_of_its_classes_and_images_cannot_begin_new_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "500")
    model = create_model("pola_deit_tiny", num_classes=2, img_size=32, depths=(1,))
    (tmp_path / "x.png").write_bytes(content(0))
    about = classifier_metadata(["cat", "dog"], Preprocessing((32, 32), (0.5,) * 3, (0.5,) * 3))
    key = json.dumps(json.loads(about["preprocessing"]) | {FORGED: 1})
    names = json.dumps([FORGED, f"{FORGED}!"])
    for number, changed in enumerate(({"preprocessing": key}, {"classes": names})):
        path = str(tmp_path / f"{number}.safetensors")
        save_checkpoint(model, path, metadata=about | changed)
        out, err = run(["predict", str(tmp_path / "x.png"), "--checkpoint", path], capsys)[1:]
        assert AS_ONE_LINE in out + err, changed
        assert_harmless(out + err)


def test_the_commands_print_through_one_console_alone() -> None:
    sources = {path.name: path.read_text() for path in (Path(polaformer.__file__).parent / "cli").glob("*.py")}
    assert len(sources) > 15
    assert not [
        name for name, text in sources.items() if re.search(r"= Console\(|(?<!\.)\bprint\(|[^.]\bTextColumn\(.*{", text)
    ]
    written = {name for name, text in sources.items() if re.search(r"\.write\(|\bConsole\b|\.print\(", text)}
    # Sweeps write to pipes of their processes.
    assert written == {"output.py", "sweep_run.py", "sweep_training.py"}
