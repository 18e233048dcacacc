"""Tensors that travel through a model to the attention function: their form may be asked for, their elements not."""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from numkv.errors import NotSupported

__all__ = ["Carried"]

_Tensor = torch.Tensor
_ASKED = {
    _Tensor.shape.__get__, _Tensor.dtype.__get__, _Tensor.device.__get__, _Tensor.ndim.__get__,
    _Tensor.layout.__get__, _Tensor.requires_grad.__get__, _Tensor.size, _Tensor.dim, _Tensor.__len__,
    _Tensor.is_floating_point, _Tensor.numel, _Tensor.is_contiguous, _Tensor.stride,
}  # fmt: skip


class Carried(torch.Tensor):  # type: ignore[misc]
    """A tensor whose elements only the attention function ``numkv`` knows; whatever else would read them raises."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ASKED:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is _Tensor.to:  # where it changes nothing
            rest = [*args[1:], *(kwargs or {}).values()]
            if all(x in (args[0].device, args[0].dtype, True, False) for x in rest):
                return args[0]
        cls.refuse(getattr(func, "__name__", str(func)))

    @classmethod
    def refuse(cls, name: str) -> NoReturn:
        """Raise the error for a function of this name that would read elements."""
        raise NotSupported(
            f"attention implementation 'numkv': expected its tensors to be read by it alone, got {name} on one"
        )
