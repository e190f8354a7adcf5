"""What tests of the operator share: the backends they run over."""

import pytest

from polaformer.ops import backends


@pytest.fixture(scope="module", params=["torch", "cpu"])
def each_backend(request):
    """Runs the module once for each backend that "auto" may stand for on a CPU; gives its name."""
    reason = backends.MODULES[request.param].why_not()
    if reason is not None:
        pytest.skip(f"backend {request.param}: {reason}")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backends, "_fastest", lambda device, dtype, width: request.param)
        yield request.param
