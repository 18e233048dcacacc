"""A simulated driver without a device, which shows which kernels a program launches.

Kernels compile without a driver. The kernels of a call are known only when it runs: they depend on kinds, head dims,
alignment and the device's shared memory. `pretend` gives a process a device of a named compute capability, whose memory
is host memory. Calls then do everything that they do on a GPU, but launches are recorded, not run; see
`numkv.kernels.cuda.launches.noted`. Results are meaningless, so the process must not be used for anything else.
"""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

from numkv.errors import NumkvError
from numkv.kernels.cuda import streams

#: Shared memory that a block may request, in bytes, by compute capability (CUDA C++ Programming Guide, "Technical
#: Specifications per Compute Capability"), less the kilobyte that the system reserves.
OPTIN_BYTES = {
    (7, 5): 64 << 10, (8, 0): 163 << 10, (8, 6): 99 << 10, (8, 7): 163 << 10, (8, 9): 99 << 10,
    (9, 0): 227 << 10, (10, 0): 227 << 10, (10, 3): 227 << 10, (12, 0): 99 << 10, (12, 1): 99 << 10,
}  # fmt: skip


class _Device:
    """The part of a `cuda.core` device that Numba uses."""

    device_id, name, uuid = 0, "a device that is not here", "0" * 32
    compute_capability = (0, 0)
    context = SimpleNamespace(handle=1)

    def __init__(self, number: int = 0) -> None:
        pass

    def set_current(self) -> None:
        """Do nothing: the device is current already."""


class _Stream:
    """The part of a `cuda.core` stream that numkv uses."""

    device = _Device

    @classmethod
    def from_handle(cls, handle: int) -> _Stream:
        """Return a stream."""
        return cls()


class _Driver:
    """The driver functions that numkv and Numba call before a launch, over host memory."""

    def __init__(self, driver: Any, optin_bytes: int) -> None:
        self._of, self._optin_bytes = driver, optin_bytes
        self._memory: dict[int, Any] = {}
        self._context: Any = None

    def _cuDeviceGetAttribute(self, of: Any, device: Any) -> int:  # noqa: N802
        wanted = self._of.CUdevice_attribute
        if of == wanted.CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN:
            return self._optin_bytes
        if of == wanted.CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT:
            return 132  # those of an H200; the capability does not determine them
        raise NotImplementedError(f"an absent device: {of}")

    def _cuCtxGetCurrent(self) -> Any:  # noqa: N802
        return self._context or self._of.CUcontext(0)

    def _cuCtxPushCurrent(self, context: Any) -> None:  # noqa: N802
        self._context = context

    def _cuMemAlloc(self, nbytes: int) -> Any:  # noqa: N802
        memory = ctypes.create_string_buffer(nbytes + 512)
        start = -(-ctypes.addressof(memory) // 512) * 512
        self._memory[start] = memory
        return self._of.CUdeviceptr(start)

    def _cuMemFree(self, pointer: Any) -> None:  # noqa: N802
        self._memory.pop(int(pointer), None)

    def _cuMemHostAlloc(self, nbytes: int, flags: int) -> int:  # noqa: N802
        return int(self._cuMemAlloc(nbytes))

    def _copy(self, to: Any, source: Any, nbytes: int, stream: Any = None) -> None:
        ctypes.memmove(int(to), int(source), nbytes)

    def _cuMemsetD8Async(self, to: Any, byte: int, nbytes: int, stream: Any) -> None:  # noqa: N802
        ctypes.memset(int(to), byte, nbytes)

    def answering(self) -> dict[str, Any]:
        """Return the functions by name, as in `cuda.bindings.driver`: each returns its error, then its result."""
        done = self._of.CUresult.CUDA_SUCCESS

        def of(name: str, answer: Any) -> Any:
            def function(*args: Any) -> Any:
                found = answer(*args)
                if found is None:
                    return (done,)
                return (done, *found) if isinstance(found, tuple) else (done, found)

            return function

        fixed = {
            "cuInit": None, "cuDriverGetVersion": 13000, "cuDeviceGetCount": 1, "cuDeviceGet": 0, "cuCtxPopCurrent": 1,
            "cuCtxGetDevice": 0, "cuCtxSynchronize": None, "cuStreamSynchronize": None, "cuEventCreate": 1,
            "cuEventRecord": None, "cuEventQuery": None, "cuEventSynchronize": None, "cuStreamCreate": 1,
            "cuStreamWaitEvent": None, "cuThreadExchangeStreamCaptureMode": 0, "cuMemFreeHost": None,
            "cuMemGetInfo": (1 << 36, 1 << 36), "cuPointerGetAttribute": 0,
        }  # fmt: skip
        found = {name: of(name, lambda *args, x=x: x) for name, x in fixed.items()}
        own = [name[1:] for name in dir(self) if name.startswith("_cu")]
        found |= {name: of(name, getattr(self, f"_{name}")) for name in own}
        copies = ("cuMemcpyHtoD", "cuMemcpyDtoH", "cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync")
        return found | {name: of(name, self._copy) for name in copies}


def pretend(cc: tuple[int, int]) -> None:
    """Give this process a simulated device, before the process uses CUDA.

    Parameters
    ----------
    cc : tuple of int
        The device's compute capability, one of `OPTIN_BYTES`.

    Raises
    ------
    NumkvError
        If the process has used CUDA already, or has the simulator.
    """
    if streams.SIMULATED or streams.places:
        raise NumkvError("expected a process that has not used CUDA, without NUMBA_ENABLE_CUDASIM")
    import cuda.core
    from cuda.bindings import driver
    from numba.cuda.cudadrv import driver as of_numba

    _Device.compute_capability = cc
    for name, function in _Driver(driver, OPTIN_BYTES[cc]).answering().items():
        setattr(driver, name, function)
    of_numba.ExperimentalDevice = _Device
    of_numba.driver.is_initialized, of_numba.driver.initialization_error = False, None
    cuda.core.Stream = _Stream
