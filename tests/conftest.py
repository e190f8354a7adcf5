import os
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from polaformer.ops import processor
from polaformer.ops.polarity import backends

GOLDEN = Path(__file__).resolve().parents[2] / "shared" / "golden"

settings.register_profile("default", max_examples=60, deadline=None, derandomize=True)
settings.register_profile("full", max_examples=500, deadline=None, derandomize=True)  # make test-numerics, make test-all
settings.load_profile("default")

# PyTorch reads it when it first multiplies, in processes that tests start too.
if processor.bfloat16_unavailable_reason():
    os.environ[processor.VARIABLE] = processor.WITHOUT_TILES


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of tensors made with the authors' code; it lies beside the project, not in it."""
    if not GOLDEN.is_dir():
        pytest.skip("the golden files are not beside this checkout")
    return GOLDEN


@pytest.fixture(autouse=True)
def _same_random_numbers_in_every_test() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="module", params=["torch", "cpu"])
def each_backend(request):
    """Runs what asks for it once for each backend that "auto" may stand for on a CPU; gives its name."""
    reason = backends.MODULES[request.param].unavailable_reason()
    if reason is not None:
        pytest.skip(f"backend {request.param}: {reason}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "_fastest", lambda device, dtype, width: request.param)
        yield request.param
