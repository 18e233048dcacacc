"""Where arrays live and kernels run: ``"cpu"`` and ``"cuda"``.

A target takes arrays in (`Target.asarray`), allocates them, brings them back to the host, and gives the view that its
kernels work on (`Target.words`). Objects hold a target and never ask which one it is.
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
    """The target of a name.

    Parameters
    ----------
    target : {"cpu", "cuda"}
        Where to compute. ``"cuda"`` needs an NVIDIA GPU and the ``cuda`` extra, or ``NUMBA_ENABLE_CUDASIM=1``.

    Returns
    -------
    Target

    Raises
    ------
    ValueError
        If there is no such target.
    NotSupported
        If ``"cuda"`` is asked for where there is no CUDA.
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
    """The target of a key; see `numkv.targets.base.Target`. What is made by one is for arrays of that key alone."""
    return _CPU if key == "cpu" else _cuda()


def of(x: Any) -> Target:
    """The target that an array is on.

    Parameters
    ----------
    x : object
        An array, or what hands one over.

    Returns
    -------
    Target
        CUDA for device arrays, else the CPU, whose checks say what is wrong with anything that is no array at all.
    """
    if isinstance(x, np.ndarray):
        return _CPU
    try:
        if getattr(x, "__cuda_ndarray__", False):  # whose interface takes long to make
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
    except Exception:  # an object that fails to say where it is
        return _CPU
    return _CPU


def on_stream(stream: Any) -> contextlib.AbstractContextManager[None]:
    """A context in which this thread's CUDA calls run on a stream.

    Outside of it, a call with arrays of torch or CuPy runs on the library's current stream. Other calls run on the
    legacy default stream. Calls on the CPU are done when they return, here as elsewhere.

    Parameters
    ----------
    stream : object
        A stream of numba.cuda, CuPy or torch, an object with ``__cuda_stream__``, or a stream's pointer; of the device
        that the arrays are on. None for the streams of the arrays, as outside.

    Returns
    -------
    context manager
        The innermost one holds. It can be entered again, by other threads too, each for itself.

    Raises
    ------
    NotSupported
        If it is no stream, or there is no CUDA; by a call within, if the stream is of another device than its arrays.

    Examples
    --------
    >>> import torch  # doctest: +SKIP
    >>> side = torch.cuda.Stream()  # doctest: +SKIP
    >>> with numkv.on_stream(side):  # doctest: +SKIP
    ...     layer.append(k, v)
    ...     out = layer.decode_attention(q)
    """
    if stream is None and not has_streams:  # nothing has been named
        return contextlib.nullcontext()
    get("cuda")
    from numkv.targets.cuda_calls import named

    return named(stream)
