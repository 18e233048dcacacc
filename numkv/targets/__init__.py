"""Where arrays live and kernels run: ``"cpu"`` and ``"cuda"``.

A target accepts arrays (`Target.asarray`), allocates them, copies them to the host, and returns the views for kernels
(`Target.words`). Objects have a target and never ask for its name.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import numpy as np

from numkv.errors import NumkvError
from numkv.targets.base import Array, Target
from numkv.targets.cpu import CpuTarget
from numkv.targets.streamed import has_streams

__all__ = ["Array", "CpuTarget", "Target", "get", "of"]


def get(target: str) -> Target:
    """Return the target of a name.

    Parameters
    ----------
    target : {"cpu", "cuda"}
        Its name. ``"cuda"`` needs an NVIDIA GPU and the ``cuda`` extra, or ``NUMBA_ENABLE_CUDASIM=1``.

    Returns
    -------
    Target

    Raises
    ------
    ValueError
        If there is no such target.
    NotSupported
        If CUDA is not available.
    """
    if isinstance(target, str):
        if target == "cpu":
            return _CPU
        if target == "cuda":
            return _cuda()
    got = repr(target[:40]) if isinstance(target, str) else type(target).__name__
    raise ValueError(f'`target`: expected "cpu" or "cuda", got {got}')


_CPU: Target = CpuTarget()


@functools.cache
def _cuda() -> Target:
    from numkv.targets.cuda_loading import load_cuda

    load_cuda()
    from numkv.targets.cuda import CudaTarget

    return CudaTarget()


def by_key(key: str) -> Target:
    """Return the target of a key; see `numkv.targets.base.Target.key`."""
    return _CPU if key == "cpu" else _cuda()


def of(x: Any) -> Target:
    """Return the target of an array.

    Parameters
    ----------
    x : object
        An array, or an object with an array interface.

    Returns
    -------
    Target
        CUDA for device arrays, else the CPU, whose checks reject anything that is no array.
    """
    if isinstance(x, np.ndarray):
        return _CPU
    try:
        if getattr(x, "__cuda_ndarray__", False):  # first, because its interface is slow to make
            return get("cuda")
        if type(x).__module__.partition(".")[0] == "torch" and hasattr(x, "is_cuda"):
            return get("cuda") if x.is_cuda else _CPU
        if hasattr(x, "__cuda_array_interface__") or "cuda" in type(x).__module__:
            return get("cuda")
        device = getattr(x, "__dlpack_device__", None)
        if device is not None and device()[0] == 2:  # kDLCUDA
            return get("cuda")
    except (NumkvError, MemoryError):
        raise
    except Exception:  # an object with a broken interface
        return _CPU
    return _CPU


def on_stream(stream: Any) -> contextlib.AbstractContextManager[None]:
    """Return a context in which this thread's CUDA calls run on a stream.

    Outside of it, a call with arrays of torch or CuPy runs on the library's current stream. Other calls run on the
    legacy default stream. Calls on the CPU are always complete when they return.

    Parameters
    ----------
    stream : object
        A stream of numba.cuda, CuPy or torch, an object with ``__cuda_stream__``, or a stream's pointer, on the device
        of the arrays. None chooses the streams of the arrays, as outside of a context.

    Returns
    -------
    context manager
        The innermost context decides. Any number of threads may enter it, each for itself.

    Raises
    ------
    NotSupported
        If it is no stream, or CUDA is not available. Calls within raise it if the stream and their arrays are on
        different devices.

    Examples
    --------
    >>> import torch  # doctest: +SKIP
    >>> side = torch.cuda.Stream()  # doctest: +SKIP
    >>> with numkv.on_stream(side):  # doctest: +SKIP
    ...     layer.append(k, v)
    ...     out = layer.decode_attention(q)
    """
    if stream is None and not has_streams:  # no context has named a stream
        return contextlib.nullcontext()
    get("cuda")
    from numkv.targets.cuda_calls import named

    return named(stream)
