"""Memory of a call: bytes that are counted by hand, allocations of a known size."""

import ctypes
import sys
import weakref

import pytest
import torch

from polaformer.analysis.call_memory import allocated_peak, resident_peak, saved_bytes

MEBI = 2**20


def test_saved_bytes_of_a_product_are_its_two_factors_each_storage_once() -> None:
    x, y = torch.randn(10, 100, requires_grad=True), torch.randn(10, 100, requires_grad=True)
    assert saved_bytes(lambda: x * y) == 2 * 4000
    assert saved_bytes(lambda: x * x) == 4000
    assert saved_bytes(lambda: x[:5] * x[5:]) == 4000  # two views of one storage
    assert saved_bytes(lambda: (x * y).exp()) == 3 * 4000  # exp keeps its result
    assert saved_bytes(lambda: x + y) == 0
    assert saved_bytes(lambda: x * y, apart_from=[y]) == 4000


def test_saved_tensors_are_freed_after_they_were_counted() -> None:
    found = []

    def forward() -> torch.Tensor:
        result = torch.ones(10, requires_grad=True).exp()
        found.append(weakref.ref(result))
        return result

    assert saved_bytes(forward) == 40
    assert found[0]() is None


def test_the_allocators_peak_is_what_lived_at_the_same_time() -> None:
    def call() -> torch.Tensor:
        first = torch.empty(MEBI, dtype=torch.uint8)
        del first
        second, third = (torch.empty(2 * MEBI, dtype=torch.uint8) for _ in range(2))
        return second[:1] + third[:1]

    assert 4 * MEBI <= allocated_peak(call) < 4 * MEBI + 1000


@pytest.mark.skipif(sys.platform != "linux", reason="the system does not report it")
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
