"""A program of its own, for one contender at one shape: what it needs must not be mixed with what others left behind.

Called as `python -m polaformer.bench.memory_probe` with a Question as JSON; prints an Answer as JSON on its last line.
"""

import json
import sys
from typing import Any, NamedTuple

import torch

from polaformer.bench.agreement import Shape, random_inputs
from polaformer.bench.contenders import CONTENDERS, FOR_MEMORY, Contender
from polaformer.bench.correctness import correctness
from polaformer.bench.memory import allocated_peak, resident_peak, saved_bytes
from polaformer.bench.passes import Pass

WARM_UP = 256  # tokens: everything is loaded, little is allocated


class Question(NamedTuple):
    """What to measure; limit: bytes that the process may ask for, so that not the whole machine runs out of memory."""

    name: str
    shape: Shape
    device: str
    threads: int | None
    limit: int | None


class Answer(NamedTuple):
    """Bytes beyond the inputs, forward alone and forward with backward; or why there are none."""

    error: float | None = None
    inputs: int | None = None
    saved: int | None = None
    forward_allocated: int | None = None
    forward_resident: int | None = None
    both_allocated: int | None = None
    both_resident: int | None = None
    failed: str | None = None


def answer(question: Question) -> Answer:
    """Checks that the contender is right at a small shape, which also loads what it needs, then measures."""
    if question.threads is not None:
        torch.set_num_threads(question.threads)
    _limit(question.limit)
    contender = (CONTENDERS | FOR_MEMORY)[question.name]
    batch, heads, tokens, width = question.shape
    try:
        error = correctness(contender, (batch, heads, min(tokens, WARM_UP), width), question.device)
        return _measured(contender, question, error)
    except (MemoryError, RuntimeError) as problem:
        return Answer(failed=_reason(problem))


def _measured(contender: Contender, question: Question, error: float) -> Answer:
    shape, device = question.shape, question.device
    inputs = random_inputs(shape, device=device)
    attention = contender.build(shape)
    forward, both = Pass(attention, inputs, backward=False), Pass(attention, inputs, backward=True)
    if contender.is_compiled:
        forward(), both()  # the compiler needs memory of its own
    resident = [resident_peak(one) if device == "cpu" else None for one in (forward, both)]
    allocated = [allocated_peak(one, device) for one in (forward, both)]
    given = sum(x.untyped_storage().nbytes() for x in inputs)
    return Answer(error, given, saved_bytes(both.recorded), allocated[0], resident[0], allocated[1], resident[1])


def _limit(number: int | None) -> None:
    if number is not None and sys.platform == "linux":
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (number, number))


def _reason(problem: Exception) -> str:
    text = str(problem).strip().splitlines()[0] if str(problem).strip() else type(problem).__name__
    is_memory = isinstance(problem, MemoryError) or "memory" in text or "bad_alloc" in text
    return "out of memory" if is_memory else f"{type(problem).__name__}: {text}"


if __name__ == "__main__":
    asked: dict[str, Any] = json.loads(sys.argv[1])
    print(json.dumps(answer(Question(**asked))._asdict()))
