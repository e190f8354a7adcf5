"""Options that depend on a recipe or a task: one declaration defines both help and parser."""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import pytest

from commands import run
from polaformer.cli.check import Check
from polaformer.cli.evaluate import Evaluate
from polaformer.cli.options import as_arguments, flag, parse, peek_option, positional_arguments, print_help
from polaformer.cli.predict import Predict
from polaformer.cli.resume import Resume
from polaformer.cli.train import Train
from polaformer.errors import SettingsError
from polaformer.recipes.registry import find
from polaformer.tasks.classification.task import CLASSIFICATION
from polaformer.tasks.recipe import POSITIONAL, option_names

COMMANDS: dict[str, tuple[list[str], tuple[Any, ...]]] = {
    "train": (["train", "digits/pola-vit-tiny"], (Train(), find("digits/pola-vit-tiny"))),
    "resume": (["resume"], (Resume(), CLASSIFICATION.resumption())),
    "eval": (["eval"], (Evaluate(), CLASSIFICATION.evaluation())),
    "predict": (["predict"], (Predict(), CLASSIFICATION.prediction())),
    "check": (["check"], (Check(), CLASSIFICATION.checking())),
}


@pytest.mark.parametrize("name", COMMANDS)
def test_help_lists_the_options_that_the_parser_takes_and_no_others(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    words, declared = COMMANDS[name]
    code, out, _ = run([*words, "--help"], capsys)
    assert code == 0
    assert not re.search(r"\(default:\W*\)", out)
    shown = set(re.findall(r"^[^\w-]*(--[a-z][a-z0-9-]*)", out, flags=re.M)) - {"--help"}
    assert shown == {flag(option) for one in declared for option in option_names(one)} - {"--inputs"}


@dataclass(frozen=True)
class Some:
    """Options of every kind."""

    inputs: tuple[str, ...] = field(default=(), metadata=POSITIONAL)
    number: int = 1
    share: float | None = None
    kind: Literal["a", "b"] | None = None
    path: Path | None = None
    sizes: tuple[int, ...] = ()
    loud: bool = False
    shuffle: bool = True
    level: Literal[1, 2] = 1
    pair: tuple[int, str] = (0, "")

    def problems(self) -> list[str]:
        return ["number is 13; give another"] * (self.number == 13)


@pytest.mark.parametrize(
    "given",
    [
        Some(),
        Some(number=-2, share=0.1, kind="a", path=Path("a b"), sizes=(1, 2), loud=True, shuffle=False, level=2, pair=(3, "x")),
        Some(path=Path("--odd")),
    ],
)
def test_arguments_of_options_are_those_that_they_are_parsed_from(given: Some) -> None:
    assert parse(as_arguments(given, Some()), Some(), program="p") == (given,)
    assert parse(as_arguments(Some(), given), given, program="p") == (Some(),)


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("x --number 2 y", Some(inputs=("x", "y"), number=2)),
        ("--loud x", Some(inputs=("x",), loud=True)),
        ("--loud false x", Some(inputs=("x",))),
        ("--sizes 1 2,3 --share=0.5", Some(sizes=(1, 2, 3), share=0.5)),
        ("--kind b --path some/where", Some(kind="b", path=Path("some/where"))),
        ("--kind None --share None", Some()),
        ("--number -2", Some(number=-2)),
        ("--no-shuffle x", Some(inputs=("x",), shuffle=False)),
        ("--shuffle false --level 2 --pair 3 four", Some(shuffle=False, level=2, pair=(3, "four"))),
    ],
)
def test_words_become_values(words: str, wanted: Some) -> None:
    assert parse(words.split(), Some(), program="polaformer some") == (wanted,)


def test_all_mistakes_are_told_at_once() -> None:
    words = [
        "--number",
        "1.5",
        "--kind",
        "c",
        "--nmber",
        "3",
        "--share",
        "much",
        "--sizes",
        "1",
        "x",
        "--loud",
        "--loud",
        "--path",
    ]
    with pytest.raises(SettingsError) as caught:
        parse(words, Some(), program="polaformer some")
    told = [
        "--number is 1.5; give an integer",
        "--kind is c; give one of a, b or None",
        "there is no option --nmber; did you mean '--number'? polaformer some --help lists them",
        "--share is much; give a number or None",
        "--sizes is 1 x; give integers separated by spaces",
        "--loud is given twice",
        "--path is empty; give a path or None",
    ]
    assert sorted(caught.value.problems) == sorted(told)


def test_what_the_dataclass_finds_wrong_is_told_with_the_rest() -> None:
    with pytest.raises(SettingsError) as caught:
        parse(["--number", "13", "--share", "x"], Some(), program="polaformer some")
    assert caught.value.problems == ["--share is x; give a number or None", "number is 13; give another"]


def test_the_help_of_every_kind_of_field_is_what_the_parser_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert print_help("polaformer some", "About it.", Some()) == 0
    shown = set(re.findall(r"^[^\w-]*(--[a-z][a-z0-9-]*)", capsys.readouterr().out, flags=re.M)) - {"--help", "--inputs"}
    assert "--no-shuffle" in shown
    given = {"--number": "2", "--share": "1", "--kind": "a", "--path": "x", "--sizes": "1", "--level": "2", "--pair": "1 b"}
    for option in shown:
        parse([option, *given.get(option, "").split()], Some(), program="polaformer some")


def test_words_that_belong_to_no_option_are_found_wherever_they_stand() -> None:
    assert positional_arguments(["--loud", "x", "--number", "3", "y", "--sizes", "1", "2"], Some()) == ["x", "y"]


def test_one_option_can_be_looked_up_before_the_others_are_known() -> None:
    assert peek_option("some_path", ["a", "--some-path", "b"]) == "b"
    assert peek_option("some_path", ["--some-path=c", "--some-path", "b"]) == "c"
    assert peek_option("some_path", ["--some-path"]) is None


def test_a_report_that_cannot_be_written_is_named_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from dataclasses import replace

    from polaformer.cli import demo

    monkeypatch.chdir(tmp_path)
    small = {"dims": (16,), "num_heads": (2,), "depths": (1,), "num_workers": 0}
    monkeypatch.setattr(demo, "POLA_VIT_TINY", replace(demo.POLA_VIT_TINY, **small))
    monkeypatch.setattr(demo, "TWINS", {"PolaFormer": "pola"})
    (tmp_path / "demo" / "report.html").mkdir(parents=True)
    code, _, err = run(["demo", "--epochs", "1"], capsys)
    assert code == 74
    assert err.count("cannot write to") == 1
    assert "demo/report.html" in err
