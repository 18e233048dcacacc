"""A plugin of pytest: tests of the target "cuda" run on the interpreter of PTX, without a GPU or the simulator.

    NUMBA_ENABLE_CUDASIM=0 python -m pytest -p tools.cuda.ptx_plugin tests/kernels -k cuda

A test fails if a kernel that it launched did something that its result need not show: see `tools.cuda.ptx_machine`.
"""

from __future__ import annotations

import pytest

from tools.cuda import ptx_device

device = ptx_device.start()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item):
    """Look, after a test, at what its kernels did."""
    device.forget()
    try:
        result = yield
    finally:
        error = device.driver.error
        if error is not None:
            device.check()
    device.check()
    return result
