"""Have the stub driver loaded before any test of this folder has looked for a real one."""

import contextlib
import gc

import pytest

with contextlib.suppress(pytest.skip.Exception):  # the modules that need it are skipped then
    import ptx_on_cuda  # noqa: F401


@pytest.fixture(scope="module", autouse=True)
def seldom_collections():
    """Collect garbage more seldom, for this folder alone: it takes a tenth of the time in which kernels compile."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, 20, 50)
    yield
    gc.set_threshold(*before)
