"""Calls that are like earlier ones: arrays for their tensors, at the price of one check.

PyTorch makes a NumPy array of a tensor in 0.7 us, of bfloat16 in three times that, for it finds out each time what the
tensor is. The calls of a model differ in addresses only. So the first call of a form uses the general path, and stores
a compiled check and the form of each array. The check is PyTorch's own guard for graphs: types, dtypes, devices,
dispatch keys, shapes and strides of all tensors in one call. Later calls that pass the check get arrays made of forms
and addresses, or those of earlier calls where the addresses come again.

Such an array holds no memory, and keeps none alive. It describes the places of a form's elements. It is only returned
while a tensor with elements at exactly these places exists. Other tensors, or this one's history, do not matter. It is
good for the call alone, so this is for functions that keep no array and return none of their arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from operator import call
from typing import Any, NamedTuple

import numpy as np
import torch

from numkv.storage.user_buffers import array_at

_guards: Any = None  # PyTorch's compiled check; see `_find_guards`
_address_of = torch.Tensor.data_ptr
# Forms that are kept of calls with so many tensors, and addresses of each form.
_MOST_FORMS, _MOST_ADDRESSES = 4, 512
# New forms of which each is kept; of later ones only every so many-th, as shapes may change with every call.
_EAGER = 8


class _Form(NamedTuple):
    """Shape, dtype and strides of arrays."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    strides: tuple[int, ...] | None

    @classmethod
    def of(cls, array: np.ndarray[Any, Any]) -> _Form:
        """The form of an array."""
        return cls(array.shape, array.dtype, None if array.flags.c_contiguous else array.strides)


class _Known(NamedTuple):
    """Calls of one form."""

    check: Callable[..., bool]
    forms: list[_Form]
    #: Arrays by the addresses of all tensors.
    arrays: dict[tuple[int, ...], list[Any]]


class CallCache:
    """The forms of a function's calls, and arrays for the tensors of those that have one of them."""

    def __init__(self) -> None:
        self._known: dict[int, list[_Known]] = {}  # by the number of tensors
        self._new = 0

    def arrays(self, tensors: list[Any]) -> list[Any] | None:
        """Arrays of tensors, none of which is to outlive the call; None if no call with such tensors is known.

        Parameters
        ----------
        tensors : list of torch.Tensor
            All tensors of a call, in the order of its arguments.

        Returns
        -------
        list of array or None
            In the same order; not to be changed.
        """
        for check, forms, known in self._known.get(len(tensors), ()):
            if check(*tensors):
                addresses = tuple(map(_address_of, tensors))
                found = known.get(addresses)
                if found is None:
                    found = list(map(array_at, addresses, *zip(*forms, strict=True)))
                    if len(known) >= _MOST_ADDRESSES:
                        known.clear()
                    known[addresses] = found
                return found
        return None

    def learn(self, tensors: list[Any], arrays: list[Any]) -> None:
        """Keep the form of a call, of which the arrays were made the plain way."""
        self._new += 1
        if _guards is None or not tensors or (self._new > _EAGER and self._new % _EAGER):
            return
        for x, array in zip(tensors, arrays, strict=True):
            # Where there are gradients the plain way decides; and memory has to be where the array says.
            if x.is_cuda or x.requires_grad or (array.size and x.data_ptr() != array.ctypes.data):
                return
        made = _Known(_check_of(tensors), [_Form.of(array) for array in arrays], {})
        earlier = self._known.get(len(tensors), [])
        self._known[len(tensors)] = [made, *earlier[: _MOST_FORMS - 1]]


def _check_of(tensors: list[Any]) -> Callable[..., bool]:
    """Return a function that compares tensors with these in all but addresses; it keeps none of them alive."""
    if len({id(x) for x in tensors}) == len(tensors):
        return _one_check(tensors)
    checks = [_one_check([x]) for x in tensors]  # as one check refuses a tensor that comes twice
    return lambda *given: all(map(call, checks, given))


def _one_check(tensors: list[Any]) -> Callable[..., bool]:
    return _guards(
        *tensors,
        dynamic_dims_sizes=[list(x.shape) for x in tensors],
        dynamic_dims_strides=[list(x.stride()) for x in tensors],
    ).check


def _find_guards() -> None:
    """Take PyTorch's compiled check, if this PyTorch has it and it tells apart what has to be told apart."""
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


_find_guards()
