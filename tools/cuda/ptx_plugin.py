"""A plugin of pytest: tests of the target "cuda" run on the interpreter of PTX, without a GPU or the simulator.

    NUMBA_ENABLE_CUDASIM=0 python -m pytest -p tools.cuda.ptx_plugin tests/kernels -k cuda

A test also fails if one of its kernels has an error that the result does not show: see `tools.cuda.ptx_machine`.
"""

from __future__ import annotations

import pytest

from tools.cuda import ptx_device

device = ptx_device.start()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Check a test's kernels after the test."""
    device.forget()
    try:
        result = yield
    finally:
        error = device.driver.error
        if error is not None:
            device.check()
    device.check()
    return result
