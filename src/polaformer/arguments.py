"""Checks of single arguments, for every layer of the library: each error says where, what was given and what is allowed."""

import operator
from collections.abc import Sequence
from math import inf
from typing import Any


def check_integer(where: str, name: str, value: Any, least: int = 1) -> int:
    """The value as an int; raises ValueError unless it is an integer ≥ `least`."""
    try:
        number = operator.index(value)
    except TypeError:
        number = least - 1
    if number < least or isinstance(value, bool):
        raise ValueError(f"{where}: {name} is {value!r}; give an integer ≥ {least}")
    return number


def check_number(
    where: str, name: str, value: Any, *, least: float = 0.0, below: float = inf, above: bool = False, hint: str = ""
) -> None:
    """Raises ValueError unless the value is a number ≥ `least` (with above: > `least`) and < `below`."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not (least < value if above else least <= value) or not value < below:
        bound = "a finite number" if least == -inf else f"a number {'>' if above else '≥'} {least:g}"
        bound += ("" if below == inf else f" and < {below:g}") + (f" ({hint})" if hint else "")
        raise ValueError(f"{where}: {name} is {value!r}; give {bound}")


def check_flag(where: str, name: str, value: Any) -> None:
    """Raises TypeError unless the value is True or False."""
    if not isinstance(value, bool):
        raise TypeError(f"{where}: {name} is {value!r}; give True or False")


def check_choice(where: str, name: str, value: Any, allowed: Sequence[Any]) -> None:
    """Raises ValueError unless the value is one of those allowed."""
    if value not in allowed:
        raise ValueError(f"{where}: {name} is {value!r}; choose one of {', '.join(map(str, allowed))}")
