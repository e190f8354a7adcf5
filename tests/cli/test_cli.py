"""The command line end to end: help, exit codes, the demo and the benchmark."""

import inspect
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from commands import run, run_apart
from polaformer import __version__
from polaformer.cli.demo_operator import time_at
from polaformer.cli.main import COMMANDS
from polaformer.cli.output import machine_lines

PNG = b"\x89PNG\r\n\x1a\n"
TINY_BENCH = ["bench", "op", "--shapes", "1,2,16,4", "2,1,8,5", "--rounds", "1", "--without", "compile"]


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")


ALL = "demo, train, resume, eval, predict, sweep, data, check, models, convert, bench, table, env"


def python(code: str, *, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, timeout=120, check=False)


def test_importing_the_command_line_loads_no_heavy_library(tmp_path: Path) -> None:
    heavy = ("torch", "numpy", "matplotlib", "sklearn", "timm")
    done = python(f"import polaformer.cli.main, sys; print([m for m in {heavy} if m in sys.modules])", cwd=tmp_path)
    assert done.stdout.strip() == "[]"


def test_help_loads_no_heavy_library(tmp_path: Path) -> None:
    code = "import sys\nfrom polaformer.cli.main import main\ntry: main(['demo', '--help'])\nexcept SystemExit: pass\n"
    done = python(f"{code}print('loaded' if 'torch' in sys.modules else 'light')", cwd=tmp_path)
    assert done.stdout.splitlines()[-1] == "light"


def test_help_lists_every_command_with_a_line_about_it(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(["--help"], capsys)
    assert code == 0
    for name, entry in COMMANDS.items():
        assert name in out
        assert (entry.load().__doc__ or "").splitlines()[0] in out


@pytest.mark.parametrize("name", COMMANDS)
def test_help_of_a_command_describes_every_option_and_gives_an_example(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run([*name.split(), "--help"], capsys)
    assert code == 0
    assert f"Example: polaformer {name} " in out
    described = " ".join(out.replace("│", " ").split())
    assert "(default: )" not in described
    command = COMMANDS[name].load()
    source = "".join(inspect.getsource(one) for one in command.__mro__ if one is not object)  # options may be inherited
    for field in fields(command):  # type: ignore[arg-type]
        is_positional = "Positional" in str(field.type)
        renamed = re.search(r"name='(\w+)'", str(field.type))
        assert is_positional or f"--{(renamed[1] if renamed else field.name).replace('_', '-')}" in described
        (text, *_) = re.findall(rf'    {field.name}: (?:(?!\n    \w|\n\S).)*\n    """(.*?)"""', source, flags=re.DOTALL)
        assert text.split(";")[0] in described


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"], capsys) == (0, f"polaformer {__version__}\n", "")


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["dmo"], "did you mean 'demo'?"),
        (["bench", "opp"], "did you mean 'op'?"),
        (
            ["export"],
            f"choose one of: {ALL}",
        ),
        (["trian"], "did you mean 'train'?"),
        (["bench"], "choose one of: op, model, detector, memory"),
        ([], f"choose one of: {ALL}"),
        (["demo", "operator", "--lenghts", "4"], "--lengths"),
        (["demo", "--epoch", "4"], "--epochs"),
        (["bench", "op", "--shape", "1,1,1,2"], "--shapes"),
    ],
)
def test_an_unknown_command_or_option_gives_code_2_and_the_nearest_name(
    arguments: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(arguments, capsys)
    assert code == 2
    assert out == ""
    assert hint in err


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["demo", "operator", "--lengths", "64"], "a slope needs at least two different lengths"),
        (["demo", "operator", "--lengths", "64", "64"], "a slope needs at least two different lengths"),
        (["demo", "operator", "--lengths"], "a slope needs at least two different lengths"),
        (["demo", "operator", "--lengths", "0", "64"], "--lengths has 0; give integers from 1"),
        (["demo", "operator", "--lengths", "-8", "64"], "--lengths has -8; give integers from 1"),
        (["demo", "operator", "--lengths", "64", "99999999"], "--lengths has 99999999; give integers from 1"),
        (["demo", "operator", "--lengths", "many"], "--lengths"),
        (["demo", "operator", "--seed", "-1"], "--seed is -1; give an integer from 0"),
        (["demo", "--seed", "-1"], "--seed is -1; give an integer from 0"),
        (["demo", "--epochs", "0"], "--epochs is 0; give an integer from 1"),
        (["bench", "op", "--shapes"], "--shapes is empty"),
        (["bench", "op", "--shapes", "4,4,3136"], "--shapes has '4,4,3136'; give four integers"),
        (["bench", "op", "--shapes", "4,4,0,32"], "must be at least 1"),
        (["bench", "op", "--shapes", "4,4,16,1"], "the head width between 2 and 1024"),
        (["bench", "op", "--shapes", "100000000,8,1,64"], "give a smaller one"),
        (["bench", "op", "--mode", "backward"], "forward"),
        (["bench", "op", "--rounds", "0"], "--rounds is 0; give at least 1"),
        (["bench", "op", "--seconds", "nan"], "--seconds is nan; give a positive number"),
        (["bench", "op", "--threads", "99999"], "--threads is 99999; give 1 to"),
        (["bench", "op", "--shapes", "1,1,8,20000"], "the head width between 2 and 1024"),
        (["bench", "op", "--threads", "0"], "--threads is 0; give 1 to"),
    ],
)
def test_a_bad_option_gives_code_2_before_any_work(
    arguments: list[str], told: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(arguments, capsys)
    assert code == 2
    assert told in err
    assert out == ""
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("below", ["", "folder", "folder/deeper"])
def test_an_unwritable_folder_gives_code_74_before_any_work(
    below: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("not a folder", encoding="utf-8")
    out_folder = tmp_path / "file" / below
    code, out, err = run(["demo", "--out", str(out_folder)], capsys)
    assert (code, out) == (74, "")
    assert err.startswith(f"polaformer demo: cannot write to --out {out_folder}: ")
    assert len(err.splitlines()) == 1


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
@pytest.mark.parametrize("arguments", [["--help"], [*TINY_BENCH, "--json"], TINY_BENCH])
def test_a_full_standard_output_gives_code_74(arguments: list[str], tmp_path: Path) -> None:
    [(code, _, err)] = run_apart(arguments, tmp_path, stdout=Path("/dev/full"))
    assert code == 74
    assert "cannot write to standard output" in err
    assert "Traceback" not in err


@pytest.mark.parametrize("package", ["accelerate", "matplotlib", "sklearn", "tensorboard"])
def test_a_missing_extra_gives_code_2_and_the_command_that_installs_it(
    package: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    code, out, err = run(["demo", "--out", str(tmp_path / "demo")], capsys)
    assert (code, out) == (2, "")
    assert err == f'polaformer demo: {package} not installed; run: pip install "polaformer[train]"\n'
    assert not (tmp_path / "demo").exists()


def test_ctrl_c_gives_code_130_and_one_line(tmp_path: Path) -> None:
    # A shell that starts the tests in the background has them ignore Ctrl-C.
    code = "import signal, sys; signal.signal(signal.SIGINT, signal.default_int_handler); "
    code += "from polaformer.cli.main import main; sys.exit(main(['demo', 'operator']))"
    process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not (tmp_path / "operator").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.splitlines()[-1] == "polaformer demo operator: stopped by Ctrl-C"
    assert "Traceback" not in err


def test_the_operators_demo_prints_its_tables_and_saves_figures_and_results(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run(["demo", "operator", "--lengths", "32", "64", "--out", "new/folder"], capsys)
    assert code == 0
    titles = (
        "Agreement with the quadratic form",
        "Safety",
        "Sharpness",
        "Time of a forward pass",
        "Timings are for this machine",
    )
    assert all(title in out for title in titles)
    assert "done" in err
    assert [line for line in out.splitlines() if line.startswith("saved ")] == [
        "saved new/folder/sharpness.png",
        "saved new/folder/time.png",
        "saved new/folder/results.json",
    ]
    for name in ("sharpness.png", "time.png"):
        content = (tmp_path / "new/folder" / name).read_bytes()
        assert content.startswith(PNG)
        assert len(content) > 10_000
    check_demo_results(json.loads((tmp_path / "new/folder/results.json").read_text(encoding="utf-8")))


def test_the_operators_demo_as_json_prints_nothing_but_its_results(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(["demo", "operator", "--lengths", "32", "64", "--seed", "5", "--json", "--out", str(tmp_path)], capsys)
    assert code == 0
    assert out == (tmp_path / "results.json").read_text(encoding="utf-8")
    result = json.loads(out)
    assert result["seed"] == 5
    check_demo_results(result)


def check_demo_results(result: dict[str, Any]) -> None:
    """Properties of the demo's numbers that hold on every machine."""
    for dtype, tolerance in (("float32", 1e-5), ("float64", 1e-13)):
        assert set(result["agreement"][dtype]) == {"output", "q", "k", "v", "power"}
        assert all(one["relative"] < tolerance for one in result["agreement"][dtype].values())
    for magnitude in ("1e-20", "1e+20"):
        forms = result["safety"][magnitude]
        assert all(one["relative"] < 1e-4 for one in forms["ours"].values())
        assert forms["published"]["output"]["relative"] is None or forms["published"]["output"]["relative"] > 0.9
    assert {one["mechanism"] for one in result["sharpness"]} >= {"softmax", "linear", "polarity, same sign"}
    assert [point["length"] for point in result["times"]] == [32, 64]
    assert all(point[name]["median"] > 0 for point in result["times"] for name in ("polarity", "softmax"))
    assert all(point["speedup"] > 0 for point in result["times"])
    assert set(result["slopes"]) == {"polarity attention", "scaled_dot_product_attention"}
    assert result["machine"]["cpu"]


def test_time_at_a_length_times_both_mechanisms_in_the_same_rounds() -> None:
    timings = time_at(16, rounds=3)
    assert {name: len(one.samples) for name, one in timings.items()} == {"polarity": 3, "softmax": 3}


@pytest.mark.parametrize(("others", "warned"), [(None, False), (0.02, False), (0.5, True)])
def test_a_busy_machine_is_told_beside_its_timings(others: float | None, warned: bool) -> None:
    from polaformer.analysis.machine import fingerprint

    lines = machine_lines(fingerprint() | {"used_by_others": others})
    assert "Timings are for this machine" in lines[0]
    assert [line.startswith("Other programs used 50 %") for line in lines[1:]] == [True] * warned


@pytest.mark.parametrize("mode", ["forward", "both"])
def test_the_benchmark_shows_ratios_first_then_times_then_the_machine(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run([*TINY_BENCH, "--mode", mode], capsys)
    assert code == 0
    titles = ("relative to the published form", "Our fastest against", "Shape 1,2,16,4", "Shape 2,1,8,5", "Timings are for")
    places = [out.index(title) for title in titles]
    assert places == sorted(places)
    rows = [line for line in out.splitlines() if line.startswith("│ softmax (SDPA)")]
    assert len(rows) == 4
    assert ("saved (MiB)" in out) == (mode == "both")


def test_the_benchmark_as_json_prints_nothing_but_its_result(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run([*TINY_BENCH, "--json"], capsys)
    result = json.loads(out)
    assert code == 0
    assert [one["shape"] for one in result["shapes"]] == [[1, 2, 16, 4], [2, 1, 8, 5]]
    for one in result["shapes"]:
        assert one["rows"]["polarity (published)"]["speedup"] == 1.0
        assert all(row["correct"] and row["rounds"] == 1 and row["median"] > 0 for row in one["rows"].values())


def test_the_benchmark_skips_what_would_take_too_long(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run([*TINY_BENCH, "--seconds", "1e-9"], capsys)
    assert code == 0
    assert "skipped: one call took" in out


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="needs two cores")
def test_the_benchmark_uses_the_threads_it_is_given(tmp_path: Path) -> None:
    [(code, out, _)] = run_apart([*TINY_BENCH, "--threads", "2", "--json"], tmp_path)
    assert code == 0
    assert json.loads(out)["machine"]["torch_threads"] == 2


def test_the_benchmark_of_a_wrong_backend_gives_code_1_and_no_number(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from polaformer.bench import contenders

    wrong = contenders.Contender(lambda _: lambda q, k, v, power: v * power[:, None], contenders.reference.polarity_attention)
    monkeypatch.setitem(contenders.CONTENDERS, "a wrong one", wrong)
    code, out, _ = run(TINY_BENCH, capsys)
    assert code == 1
    rows = [line for line in out.splitlines() if "a wrong one" in line]
    for row in rows[:2]:
        assert [cell.strip() for cell in row.split("│")[2:-1]] == ["incorrect", "incorrect"]
    for row in rows[2:]:
        assert [cell.strip() for cell in row.split("│")[2:5]] == ["incorrect", "", ""]
