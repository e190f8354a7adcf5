"""What the commands print: nothing out of a file reaches the terminal unescaped."""

import io
import json
import re
from pathlib import Path

import pytest
from rich.progress import Progress

import polaformer
from commands import run
from pictures import content, write_folder
from polaformer.cli.output import ProgressText, Terminal, new_table, print_all, print_json, print_line
from polaformer.cli.training_view import TrainingView

# Clears the screen, colours (C1), turns the text round, goes back to the start of the line; and rich's markup and smileys.
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
    view = TrainingView(HOSTILE, 1, 1)
    view("note", {"text": HOSTILE})
    view("bad images", {"images": [HOSTILE]})
    captured = capsys.readouterr()
    assert (captured.out.count(SHOWN), captured.err.count(SHOWN)) == (5, 3)
    assert_harmless(captured.out + captured.err)
    # Borders stay straight: what is spelled out counts when columns are measured.
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
        ["check", "photos", name],  # a word too many, which the parser repeats
        ["predict", "x.png", "--checkpoint", f"{name}.pth"],
        ["convert", f"{name}.pth", "out.safetensors"],
    ):
        code, out, err = run(words, capsys)
        assert code in (2, 65)
        assert r"a\x1b[2Jb\u202e\x9bc" in out + err, words
        assert_harmless(out + err)


def test_the_commands_print_through_one_console_alone() -> None:
    sources = {path.name: path.read_text() for path in (Path(polaformer.__file__).parent / "cli").glob("*.py")}
    assert len(sources) > 15
    assert not [
        name for name, text in sources.items() if re.search(r"= Console\(|(?<!\.)\bprint\(|[^.]\bTextColumn\(.*{", text)
    ]
    written = {name for name, text in sources.items() if re.search(r"\.write\(|\bConsole\b|\.print\(", text)}
    assert written == {"output.py", "training_view.py"}
