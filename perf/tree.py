"""numkv out of the tree that ``NUMKV_PERF_TREE`` names, for `perf.worker`; what measures it is this tree's `perf`.

So both trees do the same, and whatever `perf.peers.numkv_` and `perf.calls` ask of numkv has to be public.
"""

import os
import sys
from pathlib import Path

sys.path.insert(0, os.environ["NUMKV_PERF_TREE"])

import numkv
from perf.calls import CALLS
from perf.peers.numkv_ import NAME, decode, prefill, versions

__all__ = ["CALLS", "NAME", "decode", "prefill", "versions"]

_EXPECTED = Path(os.environ["NUMKV_PERF_TREE"], "numkv").resolve()
if Path(numkv.__file__).resolve().parent != _EXPECTED:
    raise ImportError(f"expected numkv from {_EXPECTED}, got {numkv.__file__}")
