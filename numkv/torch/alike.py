"""Calls that are like earlier ones: arrays for their tensors, at the price of one check.

PyTorch makes a NumPy array of a tensor in 0.7 us, of bfloat16 in three times that, for it finds out each time what the
tensor is. The calls of a model differ in addresses only. So the first call of a form goes the plain way, and leaves
behind what it found: a compiled check of PyTorch's own, by which graphs are guarded (types, dtypes, devices, dispatch
keys, shapes, strides of all tensors in one call), and the form of each array. Later calls that pass the check get arrays
made of forms and addresses, in a tenth of a microsecond where an address comes again.

Such an array holds no memory, and keeps none alive. It says where elements of a form lie, and is handed out only while
a tensor that has its elements right there is at hand; what became of other tensors, or of this one before, does not
matter. It is good for the call alone, so this is for functions that keep no array and return none of their arguments.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

__all__ = ["AlikeCalls"]

_FIRST = 4096  # no tensor lies below
_MEMORY = (ctypes.c_char * (sys.maxsize - _FIRST)).from_address(_FIRST)
_ndarray, _address_of = np.ndarray, torch.Tensor.data_ptr
# Forms of calls that are kept, and addresses of each tensor.
_MOST_FORMS, _MOST_ADDRESSES = 4, 256
# New forms of which each is kept; of later ones only every so many-th, as shapes may change with every call.
_EAGER = 8

_Check = Callable[..., bool]


class _Form(dict[int, Any]):
    """Arrays of one form by their addresses."""

    def __init__(self, array: np.ndarray[Any, Any]) -> None:
        super().__init__()
        self._shape, self._dtype = array.shape, array.dtype
        self._strides = None if array.flags.c_contiguous else array.strides

    def __missing__(self, address: int) -> Any:
        made: Any
        if 0 in self._shape:  # which may lie nowhere
            made = np.empty(self._shape, self._dtype)
        else:
            made = _ndarray(self._shape, self._dtype, _MEMORY, address - _FIRST, self._strides)
        if len(self) >= _MOST_ADDRESSES:
            self.clear()
        self[address] = made
        return made


class AlikeCalls:
    """The forms of a function's calls, and arrays for the tensors of those that have one of them."""

    def __init__(self) -> None:
        self._forms: dict[int, Sequence[tuple[_Check, list[_Form]]]] = {}
        self._new = 0

    def arrays(self, tensors: list[Any]) -> list[Any] | None:
        """Arrays of tensors that no array outlives the call of; None if no call with such tensors is known.

        Parameters
        ----------
        tensors : list of torch.Tensor
            All tensors of a call, in the order of its arguments.
        """
        for check, forms in self._forms.get(len(tensors), ()):
            if check(*tensors):
                return [form[at] for form, at in zip(forms, map(_address_of, tensors), strict=True)]
        return None

    def learn(self, tensors: list[Any], arrays: list[Any]) -> None:
        """Keep the form of a call, of which the arrays were made the plain way."""
        self._new += 1
        if _guards is None or not tensors or (self._new > _EAGER and self._new % _EAGER):
            return
        for x, array in zip(tensors, arrays, strict=True):
            # Where gradients come in the plain way decides; and memory has to be where the array says.
            if x.requires_grad or (array.size and x.data_ptr() != array.ctypes.data):
                return
        forms = [_Form(array) for array in arrays]
        known = self._forms.get(len(tensors), ())[: _MOST_FORMS - 1]
        self._forms[len(tensors)] = [(_check_of(tensors), forms), *known]


def _check_of(tensors: list[Any]) -> _Check:
    """What says whether tensors are like these, but for their addresses; it holds none of them."""
    assert _guards is not None
    made = _guards(
        *tensors,
        dynamic_dims_sizes=[list(x.shape) for x in tensors],
        dynamic_dims_strides=[list(x.stride()) for x in tensors],
    )
    check: _Check = made.check
    return check


def _find_guards() -> Any:
    """PyTorch's compiled check, if this PyTorch has it and it tells apart what has to be told apart."""
    global _guards
    try:
        from torch._C._dynamo import guards

        _guards = guards.TensorGuards
        with torch.inference_mode(False), torch.device("cpu"):
            a, b = torch.zeros(2, 4, 4), torch.zeros(3, dtype=torch.int64)
            same = a.clone()
            others = [
                a[:1], a.mT, a[..., :2], a.to(torch.bfloat16), a.to("meta"), a.to_sparse(), a[0], None,
                torch._neg_view(a), torch._efficientzerotensor((2, 4, 4)), a.clone().requires_grad_(),
                torch.nn.Parameter(a, False), torch.nn.Parameter(a),
            ]  # fmt: skip
        check = _check_of([a, b])
        right = check(same, b) and not any(check(other, b) for other in others)
        _guards = _guards if right and not check(b, a) else None
    except Exception:  # a PyTorch that has it otherwise: the plain way is right, too
        _guards = None


_guards: Any = None
_find_guards()
