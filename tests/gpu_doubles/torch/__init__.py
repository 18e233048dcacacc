"""PyTorch's double: everything in it answers, or it fails, or it hangs; what it answers is nothing."""

import os
import sys
import time
from importlib.machinery import ModuleSpec
from unittest.mock import MagicMock

_how = os.environ.get("DAY_OTHERS", "answer")
if _how == "hang":
    time.sleep(3600)
if _how == "fail":
    raise ImportError("libcudart.so.13: cannot open shared object file")
_double = MagicMock()
_double.__spec__ = ModuleSpec("torch", None)
for _dtype in ("bfloat16", "float16", "float32"):
    setattr(_double, _dtype, MagicMock(itemsize=4 if _dtype == "float32" else 2))
for _name in ("nn", "nn.attention", "nn.attention.flex_attention"):
    sys.modules[f"torch.{_name}"] = MagicMock()
sys.modules["torch"] = _double
