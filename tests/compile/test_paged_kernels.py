"""A user's kernel over the arrays of a `PagedKVCache` compiles to PTX; no GPU needed. See `test_ptx`."""

import importlib.util
import os
import re

import pytest

if os.environ.get("NUMBA_ENABLE_CUDASIM") == "1":
    pytest.skip("the simulator is on: compile in a process without it", allow_module_level=True)
if importlib.util.find_spec("numba_cuda") is None:
    pytest.skip("numba-cuda is not installed (extra: cuda)", allow_module_level=True)

from numba import cuda, float32, types
from numba.cuda import dispatcher
from numba.np.numpy_support import from_dtype
from users_kernels import lse_of_kind, store_of_kind

from numkv import device
from numkv.kinds import kind


class NoDevice:
    """Stands in for the device that a kernel's helpers are compiled for."""

    compute_capability = (8, 0)


@pytest.mark.parametrize("cc", [(8, 0), (9, 0)], ids=["sm_80", "sm_90"])
@pytest.mark.parametrize("name", ["int8", "fp16"])
def test_users_kernels_compile(monkeypatch, name, cc):
    """Attention by hand, and a step's rows stored, both over what `arrays` gives."""
    of = kind(name)
    words, scales = (
        from_dtype(of.word)[:, :, :, ::1],
        types.Array(from_dtype(of.scale_word), of.scale_ndim, "C"),
    )
    fields = [words, words, scales, scales, types.int32[:, ::1], types.int32[::1], types.int64[::1]]
    arrays = types.NamedTuple(fields, device.CacheArrays)
    lse, put = lse_of_kind(name), store_of_kind(name)

    def kernel(arrays, q, k, out):
        row = cuda.local.array(8, float32)
        seq, head = cuda.blockIdx.x, cuda.threadIdx.x
        if seq < q.shape[0] and head < q.shape[1]:
            out[seq, head] = lse(arrays, q[seq, head], 0.25, seq, head // 2, row)
        if seq < k.shape[0] and head < k.shape[1]:
            put(arrays, k, k, seq, head)

    no_device = NoDevice()
    no_device.compute_capability = cc
    monkeypatch.setattr(dispatcher, "get_current_device", lambda: no_device)
    rows = types.float32[:, :, ::1]
    signature = types.void(arrays, rows, rows, types.float32[:, ::1])
    ptx, _ = cuda.compile(kernel, signature, device=False, cc=cc, output="ptx", abi="numba")
    ptx = ptx if isinstance(ptx, str) else ptx.decode()
    assert re.search(rf"^\.target sm_{cc[0]}{cc[1]}\b", ptx, re.M)
    assert ".entry" in ptx
