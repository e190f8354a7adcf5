"""The memory of contenders, measured in processes of their own, some of which die."""

import sys

import pytest

from polaformer.bench.memory import probe

linux = pytest.mark.skipif(sys.platform != "linux", reason="the system does not report it")


@linux
def test_a_probe_measures_in_a_process_of_its_own() -> None:
    shape = (1, 2, 1024, 16)
    found = probe("softmax (materialised)", shape, "cpu", 1, None)
    assert found.skipped is None
    assert (found.error or 1.0) < 1e-5
    assert found.sizes["inputs"] == 4 * (4 * 2 * 1024 * 16 + 2 * 16)
    a_map = 4 * 2 * 1024**2
    for peak in (found.sizes["forward_allocated"], found.sizes["forward_resident"]):
        assert 1.95 * a_map <= (peak or 0) <= 2.5 * a_map  # resident: some pages were there already
    assert (found.sizes["both_allocated"] or 0) > (found.sizes["forward_allocated"] or 0)
    assert a_map < (found.saved_bytes or 0) < 1.5 * a_map


@linux
def test_a_probe_that_runs_out_of_memory_says_so() -> None:
    found = probe("softmax (materialised)", (1, 4, 16384, 8), "cpu", 1, 3 * 2**30)
    assert found.skipped == "out of memory"
    assert found.sizes == {}


def test_a_probe_that_takes_too_long_or_dies_says_so() -> None:
    question = ((1, 1, 8, 4), "cpu", 1, None)
    assert probe("softmax (SDPA)", *question, seconds=0.1).skipped == "stopped after 0.1 s"
    assert (probe("nobody", *question).skipped or "").startswith("died with code 1: KeyError: 'nobody'")
