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

import numpy as np
from numba import cuda, types
from numba.cuda import dispatcher
from numba.np.numpy_support import from_dtype

import numkv.kernels.cuda as cuda_kernels
from numkv import device as row_functions
from numkv.kernels.builder import compiled
from numkv.kinds import kinds
from tools.cuda.catalogue import catalogue

TARGETS = [(8, 0), (9, 0)]
KERNELS = list(catalogue())


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


def words_of(name):
    """The words of a name, as ``attention[q fp16, K int8]``, each with its operation."""
    operation, _, words = name.partition("[")
    return {(operation, word.strip(" ]")) for word in words.split(",")}


def few_with_all_words(names):
    """A few of the names that have every word of all: each is the one that adds the most."""
    found, left = [], set().union(*map(words_of, names))
    while left:
        found.append(max(names, key=lambda name: len(words_of(name) & left)))
        left -= words_of(found[-1])
    return found


def everyday_and_nightly():
    """A few kernels with every word, for one of the targets in turn; with ``--nightly`` all kernels, for both."""
    everyday = few_with_all_words([name for name, *_ in KERNELS])
    for name, (of, kernel, signature) in zip(ids(KERNELS), KERNELS, strict=True):
        turn = everyday.index(of) if of == name and of in everyday else None
        for j, cc in enumerate(TARGETS):
            marks = [] if turn is not None and (turn + j) % 2 == 0 else [pytest.mark.nightly]
            yield pytest.param(
                name, kernel, signature, cc, marks=marks, id=f"{name}-sm_{cc[0]}{cc[1]}"
            )


@pytest.mark.parametrize(("name", "kernel", "signature", "cc"), list(everyday_and_nightly()))
def test_compiles(monkeypatch, name, kernel, signature, cc):
    assert_compiles(monkeypatch, getattr(kernel, "py_func", kernel), signature, cc)


def assert_compiles(monkeypatch, python, signature, cc):
    device = NoDevice()
    device.compute_capability = cc
    monkeypatch.setattr(dispatcher, "get_current_device", lambda: device)
    ptx, _ = cuda.compile(python, signature, device=False, cc=cc, output="ptx", abi="numba")
    ptx = ptx if isinstance(ptx, str) else ptx.decode()
    assert re.search(rf"^\.target sm_{cc[0]}{cc[1]}\b", ptx, re.M)
    assert ".entry" in ptx


def test_who_waits_is_told(monkeypatch, capsys):
    monkeypatch.setenv("NUMKV_PROGRESS", "1")
    with compiled("copy_blocks for CUDA"):
        pass
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


# ---------------------------------------------------------------- a user's own kernels


def arrays_type(kind):
    """The Numba type of the arrays of a cache on CUDA."""
    words = from_dtype(kind.word)[:, :, :, ::1]
    scales = types.Array(from_dtype(kind.scale_word), kind.scale_ndim, "C")
    ints = [types.int32[:, ::1], types.int32[::1], types.int64[::1]]
    return types.NamedTuple([words, words, scales, scales, *ints], row_functions.CacheArrays)


def users_kernel(kind):
    """A thread adds up a token's rows, and stores another one in their place."""
    slot_of, is_finite = row_functions.slot_of, row_functions.is_finite
    load, value = row_functions.load_row(kind), row_functions.load_element(kind)
    store, real = row_functions.store_row(kind), kind.compute.type

    def kernel(a, new, out):
        row = cuda.local.array(64, real)
        seq, head, t = cuda.blockIdx.x, cuda.blockIdx.y, cuda.threadIdx.x
        if t >= a.context_lens[seq]:
            return
        slot = slot_of(a.block_table[seq], t, a.k.shape[2])
        if load(a.k, a.k_scale, slot, head, row):
            total = value(a.v, a.v_scale, slot, head, 0)
            for d in range(64):
                total += row[d]
            out[seq, t, head] = total
        if is_finite(new[t, head]) and not store(new[t, head], a.k, a.k_scale, slot, head):
            out[seq, t, head] = np.float32(-1)

    return kernel


@pytest.mark.parametrize("cc", TARGETS, ids=lambda cc: f"sm_{cc[0]}{cc[1]}")
@pytest.mark.parametrize("kind", kinds(), ids=str)
def test_a_users_kernel_compiles(monkeypatch, kind, cc):
    floats = from_dtype(kind.compute)[:, :, ::1]
    signature = types.void(arrays_type(kind), floats, floats)
    assert_compiles(monkeypatch, users_kernel(kind), signature, cc)
