"""Have the stub driver loaded before any test of this folder has looked for a real one."""

import contextlib
import gc

import pytest

with contextlib.suppress(pytest.skip.Exception):  # the modules that need it are skipped then
    import ptx_on_cuda  # noqa: F401


def pytest_collection_finish() -> None:
    """Collect garbage more seldom: the compiler's own objects set it off a thousand times, for a tenth of the time."""
    gc.set_threshold(50_000, 20, 50)
