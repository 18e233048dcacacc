"""Skip tests of the instruments unless the process has neither the simulator nor a GPU's driver."""

import importlib.util
import os
import shutil

import pytest

if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1":
    pytest.skip("the simulator is on: these run in a process without it", allow_module_level=True)
if importlib.util.find_spec("numba_cuda") is None:
    pytest.skip("numba-cuda is not installed (extra: cuda)", allow_module_level=True)
if shutil.which(os.environ.get("CC", "cc")) is None:
    pytest.skip("the stub driver needs a C compiler", allow_module_level=True)

if os.path.exists("/dev/nvidiactl"):
    pytest.skip("there is a GPU, which the stub driver would hide", allow_module_level=True)

from tools.cuda import ptx_device

# Must come before a test loads a driver.
device = ptx_device.start()
