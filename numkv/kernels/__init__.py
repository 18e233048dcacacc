"""Kernels: who owns which row. One operation per file, the same file names under ``cpu`` and ``cuda``.

Objects reach them through `on`, so that nothing outside this folder asks which target it runs on.
"""

from __future__ import annotations

import importlib
from types import ModuleType

__all__ = ["on"]


def on(target: str) -> ModuleType:
    """The operations of a target, as a module whose attributes are host functions.

    Parameters
    ----------
    target : {"cpu", "cuda"}
        Name of the target.

    Returns
    -------
    module
        ``numkv.kernels.cpu`` or ``numkv.kernels.cuda``; the latter imports Numba's CUDA target when first asked for.
    """
    return importlib.import_module(f"numkv.kernels.{target}")
