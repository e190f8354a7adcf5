"""The C++ compiler of this machine: finding it, choosing its options, running it.

A few lines of probe code show which options the compiler accepts; then it compiles once. A failure for any other reason, such
as a killed compiler or a full disk, is an error: it must not leave a kernel behind that is slower for good.
"""

import functools
import os
import shlex
import shutil
import subprocess
from pathlib import Path

HEADERS = Path(__file__).parent
OPTIONS = ("-std=c++17", "-O3", "-ffp-contract=fast", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared", "-w")
# What compilers call "the processor that I run on", and OpenMP; the first option that works is used, "" always does.
FOR_THIS_PROCESSOR = ("-march=native", "-mcpu=native", "")
THREADS = ("-fopenmp", "")
# What compilers print when they are killed or run out of space: the options are not to blame.
OPTIONS_NOT_TO_BLAME = (
    "signal",
    "unable to execute command",
    "No space left",
    "out of memory",
    "annot allocate",
    "virtual memory exhausted",
)
# Makes the compiler emit the processor's newest instructions, which an older assembler may not know, and look for OpenMP.
PROBE = """
#if defined(_OPENMP)
#include <omp.h>
#endif
extern "C" void probe(float* to, const float* from, int count) {
#if defined(__FLT16_MAX__)
    for (int i = 0; i < count; i++) to[i] += (float)(_Float16)from[i];
#endif
    for (int i = 0; i < count; i++) to[i] += from[i] > 0 ? from[i] * to[i] : 0;
}
"""


class BuildError(Exception):
    """Why there is no library, in one line."""


def find_compiler() -> list[str] | None:
    """The command of a C++ compiler: that of the variable CXX if set, else the first one found; None without one."""
    value = os.environ.get("CXX", "")
    try:
        requested = shlex.split(value)
    except ValueError:  # an unclosed quotation mark: not a list of words
        requested = [value]
    for command in [requested] if requested else [["g++"], ["clang++"], ["c++"]]:
        if shutil.which(command[0]):
            return command
    return None


def supported_options(compiler: list[str], directory: Path) -> list[str]:
    """The options of FOR_THIS_PROCESSOR and THREADS to compile with, found by compiling PROBE in the directory.

    Raises BuildError if the compiler fails with every option, or if the options are not to blame.
    """
    source, target = directory / "probe.cpp", directory / "probe"
    source.write_text(PROBE)
    best = [option for option in (FOR_THIS_PROCESSOR[0], THREADS[0]) if option]
    if try_compile(compiler, best, source, target) is None:
        return best
    found = [
        next((one for one in options if not one or try_compile(compiler, [one], source, target) is None), "")
        for options in (FOR_THIS_PROCESSOR, THREADS)
    ]
    chosen = [one for one in found if one]
    # Last, because a passing trouble that spoiled the trials above most likely still shows here.
    compile_source(compiler, chosen, source, target)
    return chosen


def compile_source(compiler: list[str], options: list[str], source: Path, target: Path) -> None:
    """Compiles the source into the target; raises BuildError with the compiler's first error."""
    error = try_compile(compiler, options, source, target)
    if error is not None:
        raise BuildError(f"{compiler[0]} failed: {error}")


def try_compile(compiler: list[str], options: list[str], source: Path, target: Path) -> str | None:
    """Compile; returns the compiler's first error, None without one. Raises BuildError if the options are not to blame."""
    target.unlink(missing_ok=True)
    result = _run([*compiler, *OPTIONS, *options, f"-I{HEADERS}", str(source), "-o", str(target)], timeout=300)
    if result.returncode == 0 and target.exists():
        return None
    if result.returncode < 0:
        raise BuildError(f"{compiler[0]} was ended by signal {-result.returncode}; try again, perhaps with more memory free")
    lines = [line.strip() for line in result.stderr.splitlines() if line.strip()]
    for line in lines:
        if any(words in line for words in OPTIONS_NOT_TO_BLAME):
            raise BuildError(f"{compiler[0]} failed: {line}")
    return next((line for line in lines if "error" in line), lines[0] if lines else "it printed nothing")


@functools.cache
def version(compiler: tuple[str, ...]) -> str:
    """What the compiler prints about itself."""
    return _run([*compiler, "--version"], timeout=60).stdout


def _run(command: list[str], timeout: float) -> subprocess.CompletedProcess[str]:
    english = os.environ | {"LC_ALL": "C"}  # its messages are parsed
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=timeout, errors="replace", env=english)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"{command[0]} cannot be run: {error}") from error
