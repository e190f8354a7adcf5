"""Memory: bytes that are counted by hand, allocations of a known size, and processes that die."""

import ctypes
import sys

import pytest
import torch

from polaformer.bench.memory import allocated_peak, available_bytes, probe, resident_peak, saved_bytes

MEBI = 2**20
linux = pytest.mark.skipif(sys.platform != "linux", reason="the system does not report it")


def test_saved_bytes_of_a_product_are_its_two_factors_each_storage_once() -> None:
    x, y = torch.randn(10, 100, requires_grad=True), torch.randn(10, 100, requires_grad=True)
    assert saved_bytes(lambda: x * y) == 2 * 4000
    assert saved_bytes(lambda: x * x) == 4000
    assert saved_bytes(lambda: x[:5] * x[5:]) == 4000  # two views of one storage
    assert saved_bytes(lambda: (x * y).exp()) == 3 * 4000  # exp keeps its result
    assert saved_bytes(lambda: x + y) == 0
    assert saved_bytes(lambda: x * y, apart_from=[y]) == 4000


def test_the_allocators_peak_is_what_lived_at_the_same_time() -> None:
    def call() -> torch.Tensor:
        first = torch.empty(MEBI, dtype=torch.uint8)
        del first
        second, third = (torch.empty(2 * MEBI, dtype=torch.uint8) for _ in range(2))
        return second[:1] + third[:1]

    assert 4 * MEBI <= allocated_peak(call) < 4 * MEBI + 1000


@linux
def test_resident_memory_also_sees_what_pytorch_does_not_allocate() -> None:
    size = 64 * MEBI
    library = ctypes.CDLL(None)
    library.malloc.restype, library.malloc.argtypes, library.free.argtypes = (
        ctypes.c_void_p,
        [ctypes.c_size_t],
        [ctypes.c_void_p],
    )

    def call() -> None:
        block = library.malloc(size)
        ctypes.memset(block, 1, size)
        library.free(block)

    assert allocated_peak(call) < MEBI
    assert size * 0.98 <= (resident_peak(call) or 0) <= size * 1.05


@linux
def test_free_memory_is_known() -> None:
    assert (available_bytes() or 0) > MEBI


@linux
def test_a_probe_measures_in_a_process_of_its_own() -> None:
    shape = (1, 2, 1024, 16)
    found = probe("softmax (materialised)", shape, "cpu", 1, None)
    assert found.failed is None
    assert (found.error or 1.0) < 1e-5
    assert found.inputs == 4 * (4 * 2 * 1024 * 16 + 2 * 16)
    a_map = 4 * 2 * 1024**2
    for peak in (found.forward_allocated, found.forward_resident):
        assert 1.95 * a_map <= (peak or 0) <= 2.5 * a_map  # resident: some pages were there already
    assert (found.both_allocated or 0) > (found.forward_allocated or 0)
    assert a_map < (found.saved or 0) < 1.5 * a_map


@linux
def test_a_probe_that_runs_out_of_memory_says_so() -> None:
    found = probe("softmax (materialised)", (1, 4, 16384, 8), "cpu", 1, 3 * 2**30)
    assert found.failed == "out of memory"
    assert found.forward_allocated is None


def test_a_probe_that_takes_too_long_or_dies_says_so() -> None:
    question = ((1, 1, 8, 4), "cpu", 1, None)
    assert probe("softmax (SDPA)", *question, seconds=0.1).failed == "stopped after 0.1 s"
    assert (probe("nobody", *question).failed or "").startswith("died with code 1: KeyError: 'nobody'")
