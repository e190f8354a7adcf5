"""Building C++ files on the user's machine: once, whole, and one line where it cannot be.

Most of it with a library of one function, which compiles in a moment.
"""

import grp
import logging
import os
import pwd
import shutil
import stat
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from oracle import random_inputs, relative_error
from polaformer.analysis import machine
from polaformer.ops.gated_convolution import cpu as convolution
from polaformer.ops.gated_convolution.operator import gated_convolution
from polaformer.ops.native import cache as kernel_cache
from polaformer.ops.native import compiler, library
from polaformer.ops.native.compiler import BuildError
from polaformer.ops.native.library import Kernel, load
from polaformer.ops.polarity import backends, cpu, reference
from polaformer.ops.polarity.inputs import Inputs
from polaformer.ops.polarity.operator import polarity_attention

REAL = next(filter(None, map(shutil.which, ("g++", "clang++", "c++"))), None)
needs_compiler = pytest.mark.skipif(REAL is None, reason="there is no C++ compiler")


def _knows_every_option() -> bool:
    try:
        with tempfile.TemporaryDirectory() as folder:
            return REAL is not None and compiler.supported_options([REAL], Path(folder)) == ["-march=native", "-fopenmp"]
    except BuildError:
        return False


needs_every_option = pytest.mark.skipif(not _knows_every_option(), reason="the compiler knows no -march=native or no OpenMP")


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    """An empty cache of this test's own; what the process has built and chosen is forgotten before and afterwards."""
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("POLAFORMER_CACHE", str(folder))
    for name in ("CXX", "POLAFORMER_NATIVE"):
        monkeypatch.delenv(name, raising=False)
    _forget()
    yield folder
    _forget()


def _forget() -> None:
    library.warned_reasons.clear()
    for function in (cpu._kernel, convolution._kernel, convolution._missing_kernel, compiler.version, backends._fastest):
        function.cache_clear()


@pytest.fixture
def source(tmp_path) -> Path:
    path = tmp_path / "sources" / "tiny.cpp"
    path.parent.mkdir()
    path.write_text('extern "C" int answer() { return 42; }\n')
    return path


def _script(path: Path, *lines: str) -> str:
    path.write_text("\n".join(("#!/bin/sh", *lines, "")))
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def compilations(tmp_path, monkeypatch):
    """A compiler that notes its calls, but for questions after its version; gives how often it compiled more than nothing."""
    log = tmp_path / "log"
    wrapper = _script(tmp_path / "noting-compiler", f'[ "$1" = --version ] || echo "$@" >> {log}', f'exec {REAL} "$@"')
    monkeypatch.setenv("CXX", wrapper)
    return lambda: sum("probe.cpp" not in line for line in log.read_text().splitlines()) if log.exists() else 0


def _one_line(source: Path) -> str:
    """Why it cannot be built."""
    with pytest.raises(BuildError) as caught:
        load(source)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- what is built, and when ----


@needs_compiler
def test_what_was_built_once_is_not_built_again(source, cache, compilations):
    for _ in range(3):
        compiler.version.cache_clear()
        assert load(source).answer() == 42
    assert compilations() == 1
    assert [path.name.rsplit("-", 2)[0] for path in cache.iterdir()] == ["tiny"]


@needs_compiler
def test_a_changed_source_gives_another_file(source, cache, compilations):
    assert load(source).answer() == 42
    source.write_text(source.read_text().replace("42", "43"))
    assert load(source).answer() == 43
    assert compilations() == 2
    source.write_text(source.read_text().replace("43", "42"))
    assert load(source).answer() == 42
    assert compilations() == 2
    assert len(list(cache.iterdir())) == 2


@needs_compiler
def test_a_changed_header_gives_another_file(source, compilations):
    header = source.with_name("number.h")
    header.write_text("#define NUMBER 1\n")
    source.write_text('#include "number.h"\nextern "C" int answer() { return NUMBER; }\n')
    assert load(source).answer() == 1
    header.write_text("#define NUMBER 2\n")
    assert load(source).answer() == 2
    assert compilations() == 2


@needs_compiler
@pytest.mark.parametrize("changed", ["its name", "its version", "an option in CXX", "our options", "the processor"])
def test_another_compiler_option_or_processor_gives_another_file(changed, source, cache, compilations, tmp_path, monkeypatch):
    load(source)
    before = os.environ["CXX"]
    if changed == "its name":
        monkeypatch.setenv("CXX", str(shutil.copy(before, tmp_path / "another")))
    elif changed == "its version":
        _script(Path(before), '[ "$1" = --version ] && echo 99 && exit', f'exec {REAL} "$@"')
        compiler.version.cache_clear()
    elif changed == "an option in CXX":
        monkeypatch.setenv("CXX", f"{before} -DNDEBUG")
    elif changed == "our options":
        monkeypatch.setattr(compiler, "OPTIONS", (*compiler.OPTIONS, "-DNDEBUG"))
    else:
        monkeypatch.setattr(kernel_cache, "_processor", lambda: "another")
    assert load(source).answer() == 42
    assert len({path.name.rsplit("-", 2)[1] for path in cache.iterdir()}) == 2


@needs_compiler
def test_cxx_may_hold_options_and_paths_with_spaces(source, tmp_path, monkeypatch):
    folder = tmp_path / "a folder"
    folder.mkdir()
    compiler = _script(folder / "compiler", f'exec {REAL} "$@"')
    source.write_text('extern "C" int answer() { return GIVEN; }\n')
    monkeypatch.setenv("CXX", f"'{compiler}' -DGIVEN=7")
    assert load(source).answer() == 7


@needs_every_option
@pytest.mark.parametrize("unknown", ["-march=native", "-fopenmp"])
def test_a_compiler_that_does_not_know_an_option_builds_without_it(unknown, source, tmp_path, monkeypatch):
    refuse = f'case " $* " in *" {unknown} "*) echo "error: unknown {unknown}" >&2; exit 1;; esac'
    accept = f'exec {REAL} $(echo "$@" | sed s/-mcpu=native//)'  # which this one may not know
    monkeypatch.setenv("CXX", _script(tmp_path / "older", refuse, accept))
    loaded = load(source)
    assert loaded.answer() == 42
    assert (
        Kernel(loaded, None).options()
        == {"-march=native": ["-mcpu=native", "-fopenmp"], "-fopenmp": ["-march=native"]}[unknown]
    )


@needs_every_option
def test_options_are_asked_for_once_and_the_best_are_taken(source, tmp_path, monkeypatch):
    log = tmp_path / "log"
    monkeypatch.setenv("CXX", _script(tmp_path / "noting", f'echo "$@" >> {log}', f'exec {REAL} "$@"'))
    assert Kernel(load(source), None).options() == ["-march=native", "-fopenmp"]
    asked, compiled = (line for line in log.read_text().splitlines() if line != "--version")
    assert "probe.cpp" in asked
    assert "-march=native -fopenmp" in compiled
    log.unlink()
    compiler.version.cache_clear()
    load(source)
    assert log.read_text().split() == ["--version"]


@needs_every_option
@pytest.mark.parametrize("step", ["probe.cpp", "tiny.cpp"])
@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("kill -9 $$", "was ended by signal 9"),
        ("echo 'g++: fatal error: Killed signal terminated program cc1plus' >&2; exit 1", "Killed signal terminated"),
        ("echo 'fatal error: error writing to x.s: No space left on device' >&2; exit 1", "No space left on device"),
        (
            "echo 'ld: final link failed: No space left on device' >&2; echo 'collect2: error: ld returned 1' >&2; exit 1",
            "No space left on device",
        ),
        ("echo 'clang: error: unable to execute command: Killed' >&2; exit 1", "unable to execute command: Killed"),
    ],
)
def test_a_compiler_that_fails_once_without_fault_of_an_option_leaves_no_slow_kernel(
    how, told, step, source, cache, tmp_path, monkeypatch
):
    """A kernel without -march=native takes several times as long; kept, it would for good."""
    once = tmp_path / "failed once"
    fail = f'case "$*" in *{step}*) [ -e "{once}" ] || {{ touch "{once}"; {how}; }};; esac'
    monkeypatch.setenv("CXX", _script(tmp_path / "killed", fail, f'exec {REAL} "$@"'))
    assert told in _one_line(source)
    assert list(cache.iterdir()) == []
    assert Kernel(load(source), None).options() == ["-march=native", "-fopenmp"]


@needs_compiler
def test_what_fails_whatever_the_options_is_compiled_once_and_not_kept(source, cache, compilations):
    source.write_text("this is not C++")
    assert "error" in _one_line(source)
    assert compilations() == 1
    assert list(cache.iterdir()) == []


@needs_compiler
def test_a_file_whose_name_tells_no_options_is_not_trusted(source, cache, compilations):
    """So were they named when a compiler's bad moment could leave a slow one."""
    load(source)
    (path,) = cache.iterdir()
    path.rename(path.with_name(f"{path.name.split('.')[0]}.so"))
    load(source)
    assert compilations() == 2


@needs_compiler
def test_folders_of_killed_builds_are_removed_when_they_are_old_and_nothing_else_is(source, cache):
    names = [f"{kernel_cache.BUILD_PREFIX}old", f"{kernel_cache.BUILD_PREFIX}running", "somebody's"]
    for name in names:
        (cache / name).mkdir()
        (cache / name / "half").write_text("")
    for name in (names[0], names[2]):
        os.utime(cache / name, (0, time.time() - kernel_cache.ABANDONED_AFTER - 60))
    load(source)
    assert {path.name for path in cache.iterdir() if path.is_dir()} == set(names[1:])


@needs_every_option
def test_building_is_told_of_once(source, caplog):
    with caplog.at_level(logging.INFO, logger="polaformer"):
        load(source)
        load(source)
    (told,) = (record.getMessage() for record in caplog.records)
    assert "tiny.cpp for this processor, once" in told


@needs_every_option
def test_the_environment_tells_how_both_kernels_were_built_or_why_not(monkeypatch, tmp_path):
    with monkeypatch.context() as slow:
        slow.setattr(compiler, "FOR_THIS_PROCESSOR", ("",))
        found = machine.environment()
    assert found["backends"]["cpu"]["reason"].startswith("a native kernel for any processor, slow")
    assert found["kernels"]["polarity attention"]["reason"] == "slow: built for any processor (-fopenmp)"
    assert found["kernels"]["convolution and gate"]["reason"] == "slow: built for any processor (-fopenmp)"
    _forget()
    refuse = 'case "$*" in *cpu_convolution.cpp*) echo "error: no luck" >&2; exit 1;; esac'
    monkeypatch.setenv("CXX", _script(tmp_path / "half", refuse, f'exec {REAL} -O0 "$@"'))
    monkeypatch.setattr(compiler, "OPTIONS", tuple(one for one in compiler.OPTIONS if one != "-O3"))
    kernels = machine.environment()["kernels"]
    assert kernels["polarity attention"]["options"] == ["-march=native", "-fopenmp"]
    assert kernels["polarity attention"]["reason"] == "built for this processor (-march=native -fopenmp)"
    assert not kernels["convolution and gate"]["works"]
    assert "error: no luck" in kernels["convolution and gate"]["reason"]


# ---- the cache ----


@needs_compiler
@pytest.mark.parametrize("how", ["cut short", "cut in half", "empty", "one byte changed", "text"])
def test_a_damaged_file_in_the_cache_is_built_again(how, source, cache, compilations):
    """Loading half a file ends the process, without a word: it must not come to that."""
    load(source)
    (path,) = cache.iterdir()
    whole = path.read_bytes()
    middle = len(whole) // 2
    damaged = {
        "cut short": whole[:-1],
        "cut in half": whole[:middle],
        "empty": b"",
        "one byte changed": whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :],
        "text": b"not a library",
    }[how]
    path.unlink()  # this process has the whole one in its memory
    path.write_bytes(damaged)
    with path.open("rb") as opened:
        assert _answer_in_a_process_of_its_own(source) == "42"
        assert opened.read() == damaged, "it was written over, perhaps beneath a process that uses it, and not replaced"
    assert compilations() == 2
    assert _answer_in_a_process_of_its_own(source) == "42"
    assert compilations() == 2
    assert kernel_cache.find_built(cache, path.name.rsplit("-", 1)[0]) is not None


# Without PyTorch, so that it starts in a moment.
LOAD = """
import sys, pathlib
from polaformer.ops.native.library import load
assert "torch" not in sys.modules
print(load(pathlib.Path(sys.argv[1])).answer())
"""


def _start(source: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", LOAD, str(source)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def _answer(process: subprocess.Popen[str]) -> str:
    printed, errors = process.communicate(timeout=60)
    assert process.returncode == 0, (process.returncode, errors)
    return printed.strip()


def _answer_in_a_process_of_its_own(source: Path) -> str:
    return _answer(_start(source))


@needs_compiler
def test_processes_that_build_at_the_same_time_both_succeed(source, cache, tmp_path, monkeypatch):
    inside = tmp_path / "inside"
    inside.mkdir()
    wait = f"until [ $(ls {inside} | wc -l) -ge 2 ] || [ $((i = i + 1)) -ge 500 ]; do sleep 0.02; done"
    others = f'case "$*" in *tiny.cpp*) ;; *) exec {REAL} "$@";; esac'
    compiler = _script(tmp_path / "waiting", others, f"touch {inside}/$$", wait, f'exec {REAL} "$@"')
    monkeypatch.setenv("CXX", compiler)
    assert [_answer(process) for process in [_start(source), _start(source)]] == ["42", "42"]
    assert len(list(inside.iterdir())) == 2, "they did not build at the same time"
    assert all(path.suffix == ".so" for path in cache.iterdir())
    assert load(source).answer() == 42


@needs_compiler
def test_nothing_is_left_in_the_cache_but_what_was_built(source, cache, tmp_path, monkeypatch):
    load(source)
    assert [path.suffix for path in cache.iterdir()] == [".so"]
    before = sorted(cache.iterdir())
    source.write_text("this is not C++")
    _one_line(source)
    monkeypatch.setenv(
        "CXX",
        _script(tmp_path / "leaving", '[ "$1" = --version ] && exit', "for last; do :; done", "echo half > $last", "exit 1"),
    )
    _one_line(source)
    assert sorted(cache.iterdir()) == before


@needs_compiler
def test_the_cache_is_made_for_its_owner_alone(source, tmp_path, monkeypatch):
    monkeypatch.delenv("POLAFORMER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "of a user"))
    load(source)
    folder = tmp_path / "of a user" / "polaformer"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert kernel_cache.cache_directory() == tmp_path / "home" / ".cache" / "polaformer"


@pytest.mark.parametrize(
    ("mode", "accepted"),
    [(0o755, True), (0o1777, True), (0o1775, True), (0o775, False), (0o757, False), (0o777, False)],
    ids=oct,
)
def test_a_parent_that_others_can_write_is_refused_unless_the_sticky_bit_protects_what_is_in_it(
    mode, accepted, tmp_path, monkeypatch
):
    """Who can write in a parent could put another folder, and another kernel, in the place of the one that was checked."""
    _set_group(monkeypatch, tmp_path.stat().st_gid, name="staff")
    parent = tmp_path / "parent"
    folder = parent / "between" / "cache"
    folder.mkdir(parents=True)
    for path, its_mode in ((folder, 0o700), (folder.parent, 0o755), (parent, mode)):
        path.chmod(its_mode)
    (tmp_path / "link").symlink_to(folder.parent)
    for given in (folder, tmp_path / "link" / "cache"):
        monkeypatch.setenv("POLAFORMER_CACHE", str(given))
        if accepted:
            assert kernel_cache.cache_directory() == folder
        else:
            with pytest.raises(PermissionError, match=f"{parent}, above {folder}, .* is writable by others"):
                kernel_cache.cache_directory()


def _set_group(monkeypatch, gid: int, *, primary: int | None = None, name: str = "me", members: tuple[str, ...] = ()) -> None:
    """Has the system say that this user is `me` with that primary group, and what group `gid` is."""
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: SimpleNamespace(pw_name="me", pw_gid=gid if primary is None else primary))
    monkeypatch.setattr(grp, "getgrgid", lambda asked: {gid: SimpleNamespace(gr_name=name, gr_mem=list(members))}[asked])


def test_a_parent_that_only_a_group_of_this_user_alone_can_write_is_accepted(tmp_path, monkeypatch):
    """With a umask of 002, ~/.cache has the mode 775."""
    folder, gid = tmp_path / "parent" / "cache", tmp_path.stat().st_gid
    folder.mkdir(mode=0o700, parents=True)
    folder.parent.chmod(0o775)
    monkeypatch.setenv("POLAFORMER_CACHE", str(folder))
    for private in ({}, {"members": ("me",)}):
        _set_group(monkeypatch, gid, **private)
        assert kernel_cache.cache_directory() == folder
    for shared in ({"name": "staff"}, {"members": ("me", "you")}, {"primary": gid + 1}):
        _set_group(monkeypatch, gid, **shared)
        with pytest.raises(PermissionError, match="is writable by others"):
            kernel_cache.cache_directory()
    _set_group(monkeypatch, gid + 1)  # the folder's group has no name
    with pytest.raises(PermissionError, match="is writable by others"):
        kernel_cache.cache_directory()
    _set_group(monkeypatch, gid)
    monkeypatch.setattr(os, "listxattr", lambda path: ["system.posix_acl_access"], raising=False)
    with pytest.raises(PermissionError, match="is writable by others"):
        kernel_cache.cache_directory()
    monkeypatch.undo()
    monkeypatch.setenv("POLAFORMER_CACHE", str(folder))
    _set_group(monkeypatch, gid)
    folder.chmod(0o770)  # the folder itself is nobody else's, whatever the group
    with pytest.raises(PermissionError, match=f"{folder} belongs"):
        kernel_cache.cache_directory()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give folders away")
@pytest.mark.parametrize(
    ("uid_map", "owner", "can_write", "accepted"),
    [
        ("0 1000 1", 65534, False, True),
        ("0 1000 1", 65534, True, False),
        ("0 1000 1", 12345, False, False),
        ("0 0 4294967295", 65534, False, False),  # no namespace: the owner is the user called nobody
    ],
)
def test_a_parent_of_a_root_that_a_user_namespace_does_not_know_is_accepted_where_it_cannot_be_written(
    uid_map, owner, can_write, accepted, tmp_path, monkeypatch
):
    folder = tmp_path / "parent" / "cache"
    folder.mkdir(mode=0o700, parents=True)
    os.chown(folder.parent, owner, -1)
    for name, text in (("UID_MAP", uid_map), ("OVERFLOW_UID", "65534\n")):
        (tmp_path / name).write_text(text)
        monkeypatch.setattr(kernel_cache, name, tmp_path / name)
    monkeypatch.setattr(os, "access", lambda path, mode: can_write)
    monkeypatch.setenv("POLAFORMER_CACHE", str(folder))
    if accepted:
        assert kernel_cache.cache_directory() == folder
    else:
        with pytest.raises(PermissionError, match=r"parent, above .* belongs to another user"):
            kernel_cache.cache_directory()


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give folders away")
def test_a_parent_of_somebody_else_is_refused(tmp_path, monkeypatch):
    (tmp_path / "parent" / "cache").mkdir(mode=0o700, parents=True)
    monkeypatch.setenv("POLAFORMER_CACHE", str(tmp_path / "parent" / "cache"))
    assert kernel_cache.cache_directory() == tmp_path / "parent" / "cache"
    os.chown(tmp_path / "parent", 12345, -1)
    with pytest.raises(PermissionError, match=r"parent, above .* belongs to another user"):
        kernel_cache.cache_directory()


def test_parents_that_are_made_are_private_whatever_the_umask_is(tmp_path, monkeypatch):
    monkeypatch.setenv("POLAFORMER_CACHE", str(tmp_path / "a" / "b" / "cache"))
    before = os.umask(0)
    try:
        folder = kernel_cache.cache_directory()
    finally:
        os.umask(before)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.parents[:2])] == [0o700] * 3


# ---- where it cannot be ----


def _failing(tmp_path, cache, monkeypatch) -> str:
    lines = ("echo 'In file included from x' >&2", "echo 'x.cpp:1:1: error: no luck' >&2", "echo 'more' >&2", "exit 1")
    monkeypatch.setenv("CXX", _script(tmp_path / "failing", *lines))
    return "failing failed: x.cpp:1:1: error: no luck"


def _silent(tmp_path, cache, monkeypatch) -> str:
    monkeypatch.setenv("CXX", _script(tmp_path / "silent", "exit 1"))
    return "silent failed: it printed nothing"


def _idle(tmp_path, cache, monkeypatch) -> str:
    monkeypatch.setenv("CXX", _script(tmp_path / "idle", "exit 0"))
    return "idle failed: it printed nothing"


def _no_program(tmp_path, cache, monkeypatch) -> str:
    (tmp_path / "picture").write_bytes(b"\x89PNG\r\n\x1a\n\0\0")
    (tmp_path / "picture").chmod(0o755)
    monkeypatch.setenv("CXX", str(tmp_path / "picture"))
    return "picture cannot be run: "


def _missing(tmp_path, cache, monkeypatch) -> str:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", "")
    return "no C++ compiler found (g++, clang++ or c++; the variable CXX can name one)"


def _another_than_asked_for(tmp_path, cache, monkeypatch) -> str:
    monkeypatch.setenv("CXX", "/nowhere/g++")
    return "the variable CXX names '/nowhere/g++', which does not exist"


def _unclosed_quotation(tmp_path, cache, monkeypatch) -> str:
    monkeypatch.setenv("CXX", "'g++")
    return "which does not exist"


def _cache_is_a_file(tmp_path, cache, monkeypatch) -> str:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("POLAFORMER_CACHE", str(tmp_path / "file"))
    return "no place for the compiled kernel: "


def _cache_below_a_file(tmp_path, cache, monkeypatch) -> str:
    monkeypatch.setenv("POLAFORMER_CACHE", "/dev/null/kernels")
    return "no place for the compiled kernel: "


def _cache_closed(tmp_path, cache, monkeypatch) -> str:
    if os.getuid() == 0:  # whom a folder's mode does not keep out
        monkeypatch.setenv("POLAFORMER_CACHE", "/sys")
    else:
        cache.chmod(0o500)
    return "no place for the compiled kernel: "


def _cache_open_to_others(tmp_path, cache, monkeypatch) -> str:
    cache.chmod(0o770)
    return f"no place for the compiled kernel: {cache} belongs to another user or is writable by others; POLAFORMER_CACHE"


def _cache_of_somebody_else(tmp_path, cache, monkeypatch) -> str:
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    return f"no place for the compiled kernel: {cache} belongs to another user"


def _no_home(tmp_path, cache, monkeypatch) -> str:
    def homeless():
        raise RuntimeError("Could not determine home directory.")

    for name in ("POLAFORMER_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    return "no place for the compiled kernel: Could not determine home directory."


def _switched_off(tmp_path, cache, monkeypatch) -> str:
    monkeypatch.setenv("POLAFORMER_NATIVE", "0")
    return "switched off by POLAFORMER_NATIVE=0"


TROUBLES = [
    _failing,
    _silent,
    _idle,
    _no_program,
    _missing,
    _another_than_asked_for,
    _unclosed_quotation,
    _cache_is_a_file,
    _cache_below_a_file,
    _cache_closed,
    _cache_open_to_others,
    _cache_of_somebody_else,
    _no_home,
    _switched_off,
]
every_trouble = pytest.mark.parametrize("trouble", TROUBLES, ids=[one.__name__[1:] for one in TROUBLES])


@every_trouble
@needs_compiler
def test_what_stands_in_the_way_is_said_in_one_line(trouble, source, cache, tmp_path, monkeypatch):
    assert trouble(tmp_path, cache, monkeypatch) in _one_line(source)
    assert [path for path in cache.iterdir() if os.access(cache, os.R_OK)] == []


@every_trouble
@needs_compiler
def test_the_plain_path_serves_with_one_warning_and_the_kernel_is_refused(trouble, cache, tmp_path, monkeypatch):
    reason = trouble(tmp_path, cache, monkeypatch)
    found = cpu.unavailable_reason()
    assert reason in found
    assert "\n" not in found
    assert not cpu.has_float16()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
            for width in (4, 6):
                inputs = random_inputs(width=width, dtype=dtype)
                out = polarity_attention(*inputs)
                torch.autograd.grad(out.sum(), inputs)
                assert torch.equal(out, polarity_attention(*inputs, backend="torch"))
    assert [str(one.message) for one in told] == [f"polaformer: plain PyTorch computes polarity attention, slower: {found}"]
    with pytest.raises(ValueError, match="backend 'cpu' cannot be used") as caught:
        polarity_attention(*inputs, backend="cpu")
    assert found in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(RuntimeError, match="use backend='torch'") as caught:
        cpu.forward(Inputs(*inputs))
    assert found in str(caught.value)


@pytest.mark.parametrize("first", ["polarity attention", "the layer's convolution and gate"])
def test_one_reason_is_told_once_for_all_kernels(first, monkeypatch):
    monkeypatch.setenv("POLAFORMER_NATIVE", "0")
    tokens = torch.randn(1, 4, 6)
    calls = [
        lambda: polarity_attention(*(x.detach() for x in random_inputs())),
        lambda: gated_convolution(tokens, tokens, torch.randn(6, 1, 3, 3), None, None, (2, 2)),
    ]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for call in calls if first == "polarity attention" else reversed(calls):
            call()
    reason = "switched off by POLAFORMER_NATIVE=0"
    assert [str(one.message) for one in told] == [f"polaformer: plain PyTorch computes {first}, slower: {reason}"]


@needs_compiler
def test_a_library_that_cannot_be_loaded_is_said_in_one_line(source, tmp_path, monkeypatch):
    source.write_text(
        'extern "C" int missing_from_everywhere(); extern "C" int answer() { return missing_from_everywhere(); }\n'
    )
    monkeypatch.setattr(compiler, "OPTIONS", (*compiler.OPTIONS, "-Wl,-z,now"))
    assert "the compiled kernel cannot be loaded: " in _one_line(source)


# ---- the kernel itself ----


@needs_compiler
def test_the_kernel_compiles_here_also_without_threads_and_computes(cache, monkeypatch):
    monkeypatch.setattr(compiler, "THREADS", ("",))
    assert cpu.unavailable_reason() is None
    assert [path.name.rsplit("-", 2)[0] for path in cache.iterdir()] == ["cpu_kernel"]
    inputs = [x.detach() for x in random_inputs(heads=2, queries=600, keys=90, width=16, dtype=torch.float32)]
    out = polarity_attention(*inputs, backend="cpu")
    assert relative_error(out, reference.polarity_attention(*(x.double() for x in inputs))) < 1e-6


@needs_compiler
def test_a_relative_cache_and_one_in_the_home_folder_work(source, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    for wanted in ("kernels", "~/others"):
        monkeypatch.setenv("POLAFORMER_CACHE", wanted)
        assert load(source).answer() == 42
    assert {path.name for path in tmp_path.iterdir()} >= {"kernels", "others"}
