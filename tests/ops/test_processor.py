"""A processor that claims what it cannot do is found out, in a process that may end, before it ends ours."""

import subprocess
import sys
from pathlib import Path

import pytest

from polaformer.errors import SettingsError
from polaformer.ops import processor
from polaformer.training import processes


@pytest.fixture(autouse=True)
def _asked_anew(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(processor.VARIABLE, raising=False)
    processor.bfloat16_unavailable_reason.cache_clear()
    yield
    processor.bfloat16_unavailable_reason.cache_clear()


def claims_tiles(monkeypatch: pytest.MonkeyPatch, product: str) -> None:
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "flags : avx512f amx_tile amx_bf16")
    monkeypatch.setattr(processor, "MATMUL", product)


ENDS = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"


def test_a_product_that_ends_its_process_is_told_with_what_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    claims_tiles(monkeypatch, ENDS)
    reason = processor.bfloat16_unavailable_reason()
    assert reason is not None
    assert "signal 4" in reason
    assert "set ONEDNN_MAX_CPU_ISA=AVX512_CORE_FP16" in reason


def test_training_in_bf16_on_such_a_processor_is_refused_before_any_work(monkeypatch: pytest.MonkeyPatch) -> None:
    claims_tiles(monkeypatch, ENDS)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(SettingsError, match=r"precision is 'bf16'.*AMX.*set ONEDNN_MAX_CPU_ISA=.*, or choose fp32"):
        processes.create_accelerator("bf16")


def test_a_product_that_returns_is_no_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    claims_tiles(monkeypatch, "pass")
    assert processor.bfloat16_unavailable_reason() is None


def test_a_limit_that_the_user_set_is_the_users(monkeypatch: pytest.MonkeyPatch) -> None:
    claims_tiles(monkeypatch, ENDS)
    monkeypatch.setenv(processor.VARIABLE, "AVX2")
    assert processor.bfloat16_unavailable_reason() is None


def test_nothing_is_started_where_tiles_are_not_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: "flags : avx2 fma")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: 1 / 0)
    assert processor.bfloat16_unavailable_reason() is None


def test_what_is_tried_is_a_product_that_works_without_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(processor.VARIABLE, processor.WITHOUT_TILES)
    assert subprocess.run([sys.executable, "-c", processor.MATMUL], check=False).returncode == 0
