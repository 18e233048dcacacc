"""Intel's matrix unit for tests on CPUs without one: `amx_emulator.c`, built by the machine's C compiler.

Its instructions raise SIGILL here, are decoded and done in C, a microsecond or two each. Kernels have to be compiled
with the unit's names among the CPU's features, which is chosen before Numba is imported: `environment` is that of a
process that does so. The features are part of what names a kernel on disk, so no other process finds such kernels.

As a plugin of pytest (``-p amx_emulator``, in such a process) it has tests run on the emulated unit, and fail if an
instruction would have been illegal.
"""

import ctypes
import functools
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

TESTS = Path(__file__).resolve().parent
#: What a process that uses the emulator says.
SWITCH = "NUMKV_TEST_AMX"
INSTRUCTIONS = (
    "ldtilecfg", "sttilecfg", "tilerelease", "tilezero", "tileloadd", "tileloaddt1", "tilestored", "tdpbf16ps",
    "tdpbssd", "tdpbsud", "tdpbusd", "tdpbuud",
)  # fmt: skip
_UNIT = ("amx-tile", "amx-bf16", "amx-int8")
# What code around the unit's instructions needs, and the CPU must have.
_NEEDED = {"avx512f", "avx512bw", "avx512dq", "avx512vnni", "avx512bf16"}


def missing() -> str:
    """Return why the emulator cannot run here; an empty text if it can."""
    import llvmlite.binding as llvm

    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        return "the emulator of the matrix unit is for Linux on x86-64"
    if shutil.which("cc") is None:
        return "the emulator of the matrix unit needs a C compiler (cc)"
    lacking = {x for x in _NEEDED if not llvm.get_host_cpu_features().get(x)}
    return f"code around the matrix unit needs {sorted(lacking)}" if lacking else ""


def environment() -> dict[str, str]:
    """The environment of a process whose kernels are compiled for the unit."""
    import llvmlite.binding as llvm

    features = dict.fromkeys(_UNIT, True)
    features = {**llvm.get_host_cpu_features(), **features}
    flags = ",".join(f"{'+' if there else '-'}{x}" for x, there in sorted(features.items()))
    return {
        **os.environ,
        SWITCH: "1",
        "NUMBA_CPU_NAME": llvm.get_host_cpu_name(),
        "NUMBA_CPU_FEATURES": flags,
        "NUMBA_ENABLE_CUDASIM": "0",
        "PYTHONPATH": os.pathsep.join([str(TESTS), str(TESTS.parent), *filter(None, sys.path)]),
    }


class Emulator:
    """The emulator's library, and its counts of instructions."""

    def __init__(self, library):
        self.library, self.installed = library, False
        library.amx_fault.restype = ctypes.c_char_p

    def install(self):
        """Take SIGILL over, once a process."""
        if self.library.amx_install() != 0:
            raise OSError("SIGILL cannot be handled")
        self.installed = True

    def fault(self) -> str:
        """Return the first error since the last call; an empty text if there was none."""
        return self.library.amx_fault().decode()

    def counts(self) -> dict[str, int]:
        """Return how often each instruction ran since the last call."""
        found = (ctypes.c_int64 * len(INSTRUCTIONS))()
        self.library.amx_counts(found)
        return dict(zip(INSTRUCTIONS, found, strict=True))


@functools.cache
def load() -> Emulator:
    """Build the library and load it; nothing is left on disk."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "amx_emulator.so")
        command = ["cc", "-O2", "-shared", "-fPIC", "-mavx512f", "-mfma", "-ffp-contract=off"]
        subprocess.run([*command, str(TESTS / "amx_emulator.c"), "-o", str(path)], check=True)
        return Emulator(ctypes.CDLL(str(path)))


def pytest_configure(config) -> None:
    """As a plugin: have kernels use the unit."""
    if os.environ.get(SWITCH) == "1":
        from numkv.kernels.cpu.vectors import features

        features.has_amx = lambda: True  # before `engines` takes it from there


def pytest_sessionstart(session) -> None:
    """As a plugin: install the emulator, after pytest's own handler of SIGILL."""
    if os.environ.get(SWITCH) == "1":
        load().install()


@pytest.fixture(autouse=os.environ.get(SWITCH) == "1")
def nothing_illegal():
    """Fail if an instruction was one that the unit would refuse."""
    yield
    fault = load().fault()
    assert not fault, fault
