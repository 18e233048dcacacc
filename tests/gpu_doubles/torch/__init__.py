"""PyTorch's double: everything in it answers, or it fails, or it hangs; what it answers is nothing.

But its random numbers are all 1, and so attention's right result is too.
"""

import os
import sys
import time
from importlib.machinery import ModuleSpec
from unittest.mock import MagicMock

import numpy as np

_how = os.environ.get("DAY_OTHERS", "answer")
if _how == "hang":
    time.sleep(3600)
if _how == "fail":
    raise ImportError("libcudart.so.13: cannot open shared object file")


class _Array(np.ndarray):
    """An array that has some of a tensor's methods."""

    def float(self):
        return self

    cpu = long = int = numpy = float


_double = MagicMock()
_double.randn = lambda *shape, **more: np.ones(shape, np.float32).view(_Array)
_double.randperm = lambda n, **more: np.arange(n).view(_Array)
_double.compile.return_value = lambda q, k, v, **more: q
_double.nn.functional.scaled_dot_product_attention = _double.compile.return_value
_double.__spec__ = ModuleSpec("torch", None)
for _dtype in ("bfloat16", "float16", "float32"):
    setattr(_double, _dtype, MagicMock(itemsize=4 if _dtype == "float32" else 2))
for _name in ("nn", "nn.attention", "nn.attention.flex_attention"):
    sys.modules[f"torch.{_name}"] = MagicMock()
sys.modules["torch"] = _double
