"""What is said about the machine that timings are for."""

import json
import platform
import subprocess
import sys

import pytest

from polaformer.analysis.machine import ProcessorUse, available_bytes, fingerprint, processor_use, share_of_others


def test_the_fingerprint_names_the_machine_but_not_the_host() -> None:
    found = fingerprint()
    assert found["cpu"]
    assert found["cores"] >= 1
    assert found["torch_threads"] >= 1
    assert found["python"] == platform.python_version()
    assert platform.node() not in json.dumps(found).replace('"', " ").split()


def test_the_share_of_other_programs_is_what_this_one_did_not_use() -> None:
    cores = fingerprint()["cores"]
    before, after = ProcessorUse(100, 5, 50), ProcessorUse(100 + 6 * cores, 5 + 2 * cores, 60)
    assert share_of_others(before, after) == pytest.approx(0.4)
    assert share_of_others(before, before) is None
    assert share_of_others(None, after) is None


def test_processor_counters_only_grow() -> None:
    first, second = processor_use(), processor_use()
    if first is None or second is None:
        pytest.skip("the system does not tell")
    assert 0 < first.own <= second.own
    assert 0 < first.everyone <= second.everyone


def test_processes_of_its_own_are_no_other_programs() -> None:
    """Else `polaformer demo` took the process that reads its data for a busy neighbour."""
    before = processor_use()
    if before is None:
        pytest.skip("the system does not tell")
    busy = "import time\nwhile time.process_time() < 0.6: pass"
    subprocess.run([sys.executable, "-c", busy], check=True)
    after = processor_use()
    assert after is not None
    assert after.own - before.own >= 0.5


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not report it")
def test_free_memory_is_known() -> None:
    assert (available_bytes() or 0) > 2**20
