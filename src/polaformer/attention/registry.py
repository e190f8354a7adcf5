"""The attention mechanisms by name; polaformer.attention.core says what each of them is."""

import inspect
from collections.abc import Callable
from difflib import get_close_matches
from typing import Any

from polaformer.attention.core import Core
from polaformer.attention.linear import LinearCore
from polaformer.attention.pola import PolaCore
from polaformer.attention.softmax import SoftmaxCore

_CORES: dict[str, Callable[..., Core]] = {"linear": LinearCore, "pola": PolaCore, "softmax": SoftmaxCore}


def names() -> list[str]:
    """The names that `create` knows, sorted."""
    return sorted(_CORES)


def create(name: str, *, num_heads: int, head_dim: int, **options: Any) -> Core:
    """The core called `name` for `num_heads` heads of width `head_dim`; options are that core's own arguments."""
    if name not in _CORES:
        near = get_close_matches(name, _CORES, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"attention.create: there is no mechanism {name!r}; choose one of {', '.join(names())}{hint}")
    known = [p for p in inspect.signature(_CORES[name]).parameters if p not in ("num_heads", "head_dim")]
    unknown = [option for option in options if option not in known]
    if unknown:
        allowed = ", ".join(known) or "none"
        raise TypeError(f"attention.create: {name!r} does not take {', '.join(unknown)}; its options are: {allowed}")
    return _CORES[name](num_heads=num_heads, head_dim=head_dim, **options)
