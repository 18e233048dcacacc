"""Two devices, forks, and errors that a driver raises later, on the stub driver."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from processes import PATIENCE
from ptx_on_cuda import device

import numkv
from numkv import targets

TESTS = Path(__file__).resolve().parent.parent
driver = device.driver
ILLEGAL_ADDRESS, NOT_PERMITTED = 700, 800
AFTER = "a kernel that was launched earlier, by numkv or others in this process, has failed"


@pytest.mark.parametrize("what", ["devices", "fork", "end"])
def test_in_a_process_of_its_own(what):
    run = subprocess.run(
        [sys.executable, str(TESTS / "two_devices.py"), what],
        capture_output=True, text=True, timeout=PATIENCE, check=False,
        env={**os.environ, "NUMBA_ENABLE_CUDASIM": "0", "PYTHONPATH": str(TESTS.parent)},
    )  # fmt: skip
    assert run.stdout.endswith("fine\n"), run.stdout + run.stderr
    assert what != "end" or not run.stderr


def calls():
    where = targets.get("cuda")
    k = where.zeros((1, 2, 8, 32), np.float16)
    q, lens = where.zeros((1, 4, 32), np.float16), where.zeros((1,), np.int64)
    out = where.zeros((1, 4, 32), np.float16)

    def attend():
        return numkv.decode_attention(q, k, k, lens, out=out)

    for _ in range(3):
        attend()
    cache = numkv.PagedKVCache(1, 2, 32, num_blocks=4, target="cuda")
    seq = cache.add()
    return {
        "a launch": attend,
        "cuStreamSynchronize": lambda: where.to_host(out),
        "cuMemcpyHtoDAsync": lambda: cache.reserve([seq], 1),
        "cuMemAlloc": lambda: where.empty((77, 7777), np.float64),
        "cuCtxSynchronize": cache.check,
    }


OF_THE_DRIVER = {"a launch": "cuLaunchKernelEx"}


@pytest.mark.parametrize("name", ["a launch", "cuStreamSynchronize", "cuMemcpyHtoDAsync", "cuMemAlloc"])  # fmt: skip
def test_the_call_that_notices_a_kernel_gone_astray_says_so(name):
    call = calls()[name]
    with (
        driver.failing(OF_THE_DRIVER.get(name, name), ILLEGAL_ADDRESS, sticky=True),
        pytest.raises(RuntimeError, match=f"^{name}.*CUDA_ERROR_ILLEGAL_ADDRESS: {AFTER}") as error,
    ):
        call()
    assert "start a new process" in str(error.value)
    assert "compute-sanitizer" in str(error.value)


def test_everything_after_it_fails_too_and_nothing_hangs():
    all_calls = calls()
    with driver.failing("cuLaunchKernelEx", ILLEGAL_ADDRESS, sticky=True):
        for name in ("a launch", *all_calls):
            if name != "cuCtxSynchronize":
                with pytest.raises(RuntimeError, match=AFTER):
                    all_calls[name]()


def test_another_refusal_is_said_as_it_is():
    call = calls()["cuStreamSynchronize"]
    with (
        driver.failing("cuStreamSynchronize", NOT_PERMITTED),
        pytest.raises(
            RuntimeError, match=r"^cuStreamSynchronize: .* got CUDA_ERROR_NOT_PERMITTED$"
        ),
    ):
        call()
    call()


def test_a_device_without_room_leaves_a_cache_as_it_was():
    where = targets.get("cuda")
    cache = numkv.PagedKVCache(1, 2, 32, num_blocks=4, target="cuda")
    seq = cache.add()
    free = cache.stats().pool.free
    with driver.failing("cuMemAlloc", 2), pytest.raises(MemoryError, match="no room for"):
        where.empty((99, 9999), np.float64)
    with driver.failing("cuMemcpyHtoDAsync", 2), pytest.raises(MemoryError, match="no room"):
        cache.reserve([seq], 1)
    assert cache.stats().pool.free == free
    cache.rollback(cache.reserve([seq], 1))
