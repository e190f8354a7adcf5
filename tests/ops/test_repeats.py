"""Row N7: repeats with a fixed number of threads give the same bits, through autograd as users call it.

The native kernel with two threads stands in test_cpu.py. Forty repeats in the default suite, a thousand in `make test-all`.
"""

import pytest
import torch

from oracle import random_inputs, with_gradients
from polaformer.ops.polarity import backends
from polaformer.ops.polarity.operator import polarity_attention

# The plain path shares work among threads from 32768 numbers on.
SIZES = {
    "small": {"batch": 2, "heads": 2, "queries": 33, "keys": 29, "width": 8},
    "shared among threads": {"batch": 1, "heads": 2, "queries": 1100, "keys": 1100, "width": 16},
}


@pytest.fixture
def set_threads():
    """Sets the number of threads; puts it back afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.parametrize("repeats", [40, pytest.param(1000, marks=pytest.mark.long)])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("backend", "threads"), [("torch", 1), ("torch", 2), ("cpu", 1)])
def test_n7_repeats_give_the_same_bits(backend, threads, size, repeats, set_threads):
    reason = backends.MODULES[backend].unavailable_reason()
    if reason is not None:
        pytest.skip(f"backend {backend}: {reason}")
    inputs = random_inputs(**SIZES[size], dtype=torch.float32)
    cotangent = torch.randn_like(inputs[0])
    set_threads(threads)

    def once():
        return with_gradients(polarity_attention, inputs, cotangent, backend=backend)

    first = once()
    assert all(x.isfinite().all() for x in first)
    for _ in range(repeats):
        assert all(torch.equal(a.view(torch.int32), b.view(torch.int32)) for a, b in zip(once(), first, strict=True))
