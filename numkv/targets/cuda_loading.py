"""The import of ``numba.cuda``, with errors that name missing requirements."""

from __future__ import annotations

import importlib.util
from typing import Any

from numba.core import config

from numkv.errors import NotSupported

_REMEDY = (
    'install an NVIDIA driver and `pip install "numkv[cuda]"`, or set NUMBA_ENABLE_CUDASIM=1 '
    "before Python starts for Numba's simulator"
)


def load_cuda() -> Any:
    """Return ``numba.cuda``, or raise an error that names missing requirements."""
    simulated = bool(config.ENABLE_CUDASIM)
    if not simulated and importlib.util.find_spec("numba_cuda") is None:
        raise NotSupported(f'target "cuda" needs the package numba-cuda; {_REMEDY}')
    try:
        from numba import cuda
    except ImportError as error:
        raise NotSupported(f'target "cuda" does not load ({error}); {_REMEDY}') from error
    if not cuda.is_available():
        reason = " ".join(str(cuda.cuda_error() or "no device").split())
        raise NotSupported(f'target "cuda": there is no usable GPU ({reason}); {_REMEDY}')
    return cuda
