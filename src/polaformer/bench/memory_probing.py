"""Memory of contenders, each measured in a process of its own, which may die without taking this one along."""

import json
import os
import signal
import subprocess
import sys

from polaformer.bench.memory import available_bytes
from polaformer.bench.memory_probe import Answer, Question

ENVIRONMENT = {
    # The C library gives larger blocks back as soon as they are freed, rather than keeping some of them for later.
    "MALLOC_MMAP_THRESHOLD_": "65536",
    # One process compiles: others would stay behind and take memory.
    "TORCHINDUCTOR_COMPILE_THREADS": "1",
}


def probe(question: Question, *, seconds: float = 120.0) -> Answer:
    """What a fresh process answers; if it dies or takes longer than `seconds`, the answer says so."""
    command = [sys.executable, "-m", "polaformer.bench.memory_probe", json.dumps(question._asdict())]
    environment = os.environ | ENVIRONMENT
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return Answer(failed=f"stopped after {seconds:g} s")
    if done.returncode != 0:
        return Answer(failed=_death(done))
    return Answer(**json.loads(done.stdout.splitlines()[-1]))


def free_memory() -> int | None:
    """What a probe may use: all that is free now, but for a tenth."""
    there_is = available_bytes()
    return None if there_is is None else there_is * 9 // 10


def _death(done: subprocess.CompletedProcess[str]) -> str:
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        return f"killed by {name}" + (": out of memory?" if name == "SIGKILL" else "")
    lines = done.stderr.strip().splitlines()
    return f"died with code {done.returncode}" + (f": {lines[-1][:120]}" if lines else "")
