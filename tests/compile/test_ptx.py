"""Every CUDA kernel, for every kind, compiles to PTX; no GPU needed.

The simulator shows what a kernel computes, not that CUDA accepts it: it does no typing. Numba reads
the simulator's switch once, at import, so this file runs in a process of its own::

    NUMBA_ENABLE_CUDASIM=0 python -m pytest tests/compile
"""

import importlib.util
import os
import re
from pathlib import Path

import pytest

if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1":
    pytest.skip("the simulator is on: compile in a process without it", allow_module_level=True)
if importlib.util.find_spec("numba_cuda") is None:
    pytest.skip("numba-cuda is not installed (extra: cuda)", allow_module_level=True)

from numba import cuda
from numba.cuda import dispatcher

import numkv.kernels.cuda as cuda_kernels
from numkv.kernels.cuda.copy import make_copy_blocks
from numkv.kernels.cuda.simd import jit
from numkv.kinds import kinds

TARGETS = [(8, 0), (9, 0)]
KERNELS = list(cuda_kernels.catalogue())


class NoDevice:
    """Stands in for the device that a kernel's helpers are compiled for."""

    compute_capability = (8, 0)


def ids(kernels) -> list[str]:
    seen: dict[str, int] = {}
    names = []
    for name, *_ in kernels:
        seen[name] = seen.get(name, -1) + 1
        names.append(f"{name}-{seen[name]}" if seen[name] else name)
    return names


@pytest.mark.parametrize("cc", TARGETS, ids=lambda cc: f"sm_{cc[0]}{cc[1]}")
@pytest.mark.parametrize(("name", "kernel", "signature"), KERNELS, ids=ids(KERNELS))
def test_compiles(monkeypatch, name, kernel, signature, cc):
    device = NoDevice()
    device.compute_capability = cc
    monkeypatch.setattr(dispatcher, "get_current_device", lambda: device)
    python = getattr(kernel, "py_func", kernel)
    ptx, _ = cuda.compile(python, signature, device=False, cc=cc, output="ptx", abi="numba")
    ptx = ptx if isinstance(ptx, str) else ptx.decode()
    assert re.search(rf"^\.target sm_{cc[0]}{cc[1]}\b", ptx, re.M)
    assert ".entry" in ptx


def test_who_waits_is_told(monkeypatch, capsys):
    monkeypatch.setenv("NUMKV_PROGRESS", "1")
    jit(make_copy_blocks(8))
    assert "numkv: compiling copy_blocks for CUDA\n" in capsys.readouterr().err


def has_kernel(path) -> bool:
    return re.search(r"^ +def kernel\(", path.read_text(), re.M) is not None


def module_of(kernel) -> str:
    """The file or folder of a kernel: its operation."""
    module = getattr(kernel, "py_func", kernel).__module__
    return module.removeprefix(f"{cuda_kernels.__name__}.").split(".")[0]


def test_every_kernel_file_is_in_the_catalogue():
    folder = Path(cuda_kernels.__file__).parent
    files = [path.relative_to(folder) for path in folder.rglob("*.py")]
    with_kernels = {f.parts[0].removesuffix(".py") for f in files if has_kernel(folder / f)}
    assert with_kernels >= {"append", "attention", "merge", "write"}
    assert with_kernels == {module_of(kernel) for _, kernel, _ in KERNELS}


@pytest.mark.parametrize("file", ["append", "attention", "mass", "shift", "write"])
@pytest.mark.parametrize("kind", [k.name for k in kinds()])
def test_every_kind_is_in_the_catalogue(file, kind):
    assert any(module_of(kernel) == file and kind in name for name, kernel, _ in KERNELS)
