"""``numkv info``: facts for a bug report."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Iterator
from pathlib import Path

import numba
import numpy as np

import numkv
from numkv import targets
from numkv.cli.cache import size_of, warnings_of
from numkv.cli.output import cpu_name, version_of
from numkv.drawing.picture import format_bytes
from numkv.errors import NotSupported
from numkv.kernels.cpu.attention.vector import attend_few
from numkv.kernels.cpu.threads import num_threads
from numkv.kernels.cpu.vectors import features
from numkv.kernels.disk_cache import folder_of, kernel_files, places
from numkv.kinds import kinds

_PACKAGES = ("numpy", "numba", "llvmlite", "ml_dtypes", "numba-cuda", "tokenizers")


def run(arguments: argparse.Namespace) -> None:
    """Print the report.

    Parameters
    ----------
    arguments : argparse.Namespace
        No options.
    """
    facts = list(_facts())
    width = max(len(name) for name, _ in facts)
    for name, value in facts:
        print(f"{name.ljust(width)}  {value}")


def _facts() -> Iterator[tuple[str, str]]:
    yield "numkv", f"{numkv.__version__} in {Path(numkv.__file__).parent}"
    yield "python", f"{platform.python_version()} ({platform.python_implementation()})"
    yield "platform", platform.platform()
    for name in _PACKAGES:
        yield name, version_of(name) or "not installed"
    yield "blas", _blas()
    yield "cpu", cpu_name()
    yield "vector width", _vector_width()
    yield "matrix unit", "AMX" if features.has_amx() else "none"
    yield "threads", f"{num_threads()} of {os.cpu_count()} cores"
    yield "threading layer", _threading_layer()
    yield "targets", _targets()
    yield "kinds", " ".join(kind.name for kind in kinds(by_channel=True))
    yield "kernel cache", _kernel_cache()
    for line in warnings_of([folder for folder in places() if folder.is_dir()]):
        yield "warning", line
    settings = [
        f"{k}={v}" for k, v in sorted(os.environ.items()) if k.startswith(("NUMBA_", "NUMKV_"))
    ]
    yield "environment", " ".join(settings) or "no NUMBA_ or NUMKV_ variables"


def _blas() -> str:
    found = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
    return f"{found['name']} {found.get('version', '')}".rstrip()


def _vector_width() -> str:
    half = "yes" if features.HAS_HALF else "no"
    return f"{32 * features.LANES} bits ({features.LANES} floats), half floats in hardware: {half}"


def _threading_layer() -> str:
    """Return the layer that Numba chooses once a parallel function has run."""

    @numba.njit(parallel=True)  # type: ignore[untyped-decorator]
    def count(n: int) -> int:
        total = 0
        for _ in numba.prange(n):
            total += 1
        return total

    count(2)
    return str(numba.threading_layer())


def _targets() -> str:
    try:
        targets.get("cuda")
    except NotSupported as error:
        return f"cpu; no cuda ({str(error).partition(';')[0]})"
    if numba.config.ENABLE_CUDASIM:
        return "cpu, cuda in Numba's simulator"
    from numba import cuda

    device = cuda.get_current_device()
    name = device.name.decode() if isinstance(device.name, bytes) else device.name
    major, minor = device.compute_capability
    return f"cpu, cuda on {name} (compute capability {major}.{minor})"


def _kernel_cache() -> str:
    try:
        folder = folder_of(attend_few)
    except RuntimeError as error:
        return f"none ({error})"
    kernels = [path for place in places() for path in kernel_files(place)]
    size = format_bytes(size_of(kernels))
    return f"{folder} and beside it ({len(kernels)} kernels, {size}; see `numkv cache`)"
