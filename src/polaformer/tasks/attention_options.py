"""Arguments of attention layers in recipes, given as NAME=VALUE. Needs no PyTorch."""

from collections.abc import Sequence
from typing import Any


def attention_option_problems(pairs: Sequence[str] | None) -> list[str]:
    """The problems with the form of the pairs, one line each."""
    given = pairs or ()
    wrong = [pair for pair in given if not pair.partition("=")[0].isidentifier() or not pair.partition("=")[2]]
    names = [pair.partition("=")[0] for pair in given]
    twice = sorted({name for name in names if names.count(name) > 1})
    found = [f"attention_options has {pair!r}; give NAME=VALUE, such as gate=linear" for pair in wrong]
    return found + [f"attention_options gives {name} twice; give it once" for name in twice]


def parse_attention_options(pairs: Sequence[str] | None) -> dict[str, Any]:
    """The arguments by name."""
    split = (pair.partition("=") for pair in pairs or ())
    return {name: _plain_value(word) for name, _, word in split}


def _plain_value(word: str) -> bool | int | float | str | None:
    """The word as None, True, False or a number if it is one, otherwise as a string."""
    if word.lower() in ("none", "true", "false"):
        return {"none": None, "true": True, "false": False}[word.lower()]
    for kind in (int, float):
        try:
            return kind(word)
        except ValueError:
            continue
    return word
