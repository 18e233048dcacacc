"""Tensors as arrays and arrays as tensors, without copies."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import torch
from torch._C._functorch import peek_interpreter_stack

from numkv.errors import NotSupported, UnsupportedDType
from numkv.targets.base import TORCH_DTYPES, WORD_OF
from numkv.torch.call_cache import CallCache

_F = TypeVar("_F", bound=Callable[..., Any])

_Tensor = torch.Tensor
_grad_enabled, _is_compiling = torch.is_grad_enabled, torch.compiler.is_compiling
_is_tracing = torch.jit.is_tracing
_array, _from_numpy = np.ndarray, torch.from_numpy
_OTHERS = 256  # numbers of dtypes from here on are those of other libraries
_INT_OF = {1: torch.uint8, 2: torch.int16}
#: Classes of numkv, and those of `numkv.torch.objects` that take and give tensors in their place.
counterparts: dict[type, type] = {}
# Arguments that take the first result.
_OUTPUTS = ("out", "q_out")
# Dtypes that NumPy has not: what torch views them as, and what NumPy views that as.
_TO_NUMPY = {
    getattr(torch, name.partition(".")[2]): (_INT_OF[dtype.itemsize], dtype)
    for name, dtype in TORCH_DTYPES.items()
    if hasattr(torch, name.partition(".")[2])
}
_TO_TORCH = {
    dtype.num: (np.dtype(np.uint8 if dtype.itemsize == 1 else np.int16), own)
    for own, (_, dtype) in _TO_NUMPY.items()
}


def array_of(x: Any, name: str) -> Any:
    """The NumPy array on a tensor's memory; a tensor on a CUDA device as it is, which numkv takes, and anything else.

    Parameters
    ----------
    x : torch.Tensor or object
        What a caller gave.
    name : str
        What errors call it.

    Raises
    ------
    NotSupported
        If the tensor requires a gradient that is being recorded, is on another device, or has no memory of its own.
    UnsupportedDType
        If NumPy has no such dtype, and numkv has no kind for it.
    """
    if not isinstance(x, _Tensor):
        return x
    if x.requires_grad:
        refuse_gradient(x, name)
        x = x.detach()
    if x.is_cuda:
        return x
    viewed = _TO_NUMPY.get(x.dtype)
    try:
        if viewed is None:
            return x.numpy()
        return x.view(viewed[0]).numpy().view(viewed[1])
    except (RuntimeError, TypeError, ValueError) as error:
        raise _refusal(x, name, error) from error


def refuse_gradient(x: Any, name: str) -> None:
    """Refuse a tensor whose gradient is being recorded: it would be lost."""
    if x.requires_grad and _grad_enabled():
        raise NotSupported(
            f"`{name}`: expected a tensor without a gradient, as numkv computes none, got one with "
            f"requires_grad=True; pass {name}.detach(), or call under torch.no_grad()"
        )


def _refusal(x: Any, name: str, error: Exception) -> Exception:
    """Return the error for a tensor that NumPy cannot take."""
    if x.device.type != "cpu":
        return NotSupported(
            f"`{name}`: expected a tensor on the CPU or on a CUDA device, got one on {x.device}; move it with .cpu()"
        )
    if x.layout is not torch.strided or x.is_quantized:
        what = "quantised" if x.is_quantized else str(x.layout)
        return NotSupported(
            f"`{name}`: expected a dense tensor, got a {what} one; convert it with .to_dense() or .dequantize()"
        )
    if x.is_neg() or x.is_conj():
        return NotSupported(
            f"`{name}`: expected a tensor whose memory has its values, got one that is negated or conjugated lazily; "
            f"pass {name}.resolve_neg()"
        )
    if peek_interpreter_stack() is not None or type(x) not in (_Tensor, torch.nn.Parameter):
        return NotSupported(
            f"`{name}`: expected a tensor with memory of its own, got a {type(x).__name__} within torch.func.vmap, "
            "grad, torch.export or another transform; call numkv outside of it, with the batch as it is: its functions "
            "take many sequences at once"
        )
    said = str(error).split("\n")[0]
    return UnsupportedDType(
        f"`{name}`: expected a tensor that NumPy can take, got {x.dtype} ({said}); convert it with .to(torch.float32)"
    )


def tensor_of(x: np.ndarray[Any, Any]) -> Any:
    """The tensor on an array's memory; of memory that may not be written, a copy."""
    if not x.flags.writeable:
        x = x.copy()
    dtype = x.dtype
    if dtype.num < _OTHERS:  # NumPy's own
        return _from_numpy(x)
    viewed = _TO_TORCH.get(dtype.num)
    if viewed is not None:
        return _from_numpy(x.view(viewed[0])).view(viewed[1])
    if dtype in WORD_OF:
        raise UnsupportedDType(f"this PyTorch, {torch.__version__}, has no dtype for {dtype}")
    return _from_numpy(x)


def tensors_of(x: Any) -> Any:
    """A result with tensors in place of arrays, also within tuples, lists and dictionaries.

    An object of a class that has a counterpart becomes one of that: what a cache makes takes what the cache takes.
    """
    if type(x) is _array:
        return tensor_of(x)
    if type(x) in (tuple, list):
        return type(x)(map(tensors_of, x))
    if type(x) is dict:
        return {key: tensors_of(value) for key, value in x.items()}
    if getattr(x, "__cuda_ndarray__", False):
        return torch.from_dlpack(x)
    if type(x) in counterparts:
        x.__class__ = counterparts[type(x)]
    return x


def on_tensors(
    function: _F, operator: Callable[..., Any] | None = None, *, keeps: bool = True
) -> _F:
    """A function or method that takes tensors where it takes arrays, and gives them where it gives arrays.

    What is passed to take a result comes back itself.

    Parameters
    ----------
    function : callable
        What takes arrays.
    operator : callable, optional
        What to call instead where calls are traced. Without one, a trace ends before the call and begins after it.
    keeps : bool
        Whether the function may keep an array that it is given, or return it; an `out` aside.
    """
    names = tuple(inspect.signature(function).parameters)
    output = next((name for name in _OUTPUTS if name in names), "")
    place = names.index(output) if output else len(names)
    convert = converter(names, keeps=keeps)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if operator is not None and _is_compiling():
            return operator(*args, **kwargs)
        if _is_tracing():
            raise NotSupported(
                f"{function.__name__}: expected a call that runs or is compiled, got one under torch.jit.trace, which "
                "would keep its result as a constant; use torch.compile or torch.export"
            )
        given = args[place] if len(args) > place else kwargs.get(output) if kwargs else None
        arrays, named = convert(args, kwargs)
        found = function(*arrays, **named)
        if found is None:
            return None
        if given is not None and isinstance(given, _Tensor):
            return (given, tensors_of(found[1])) if isinstance(found, tuple) else given
        return tensors_of(found)

    # Without an operator a graph breaks here: PyTorch would trace numkv's own code, and its NumPy, as the model's.
    return torch.compiler.disable(call) if operator is None else call  # type: ignore[return-value]


def converter(names: tuple[str, ...], *, keeps: bool) -> Callable[..., Any]:
    """Return a function ``convert(args, kwargs)`` that replaces tensors among arguments by arrays; kwargs may change.

    Parameters
    ----------
    names : tuple of str
        Parameters of a function, in their order.
    keeps : bool
        Whether arrays may outlive the call; where not, calls like earlier ones have them cheaper.
    """

    def plain(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        arrays = [array_of(x, name) for x, name in zip(args, names, strict=False)]
        arrays += [array_of(x, "too many") for x in args[len(names) :]]  # the function says so
        return arrays, {name: array_of(x, name) for name, x in kwargs.items()}

    if keeps:
        return plain
    alike = CallCache()
    known, learn = alike.arrays, alike.learn

    def convert(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        tensors = [x for x in args if isinstance(x, _Tensor)]
        places = len(tensors)
        names_of = []
        if kwargs:
            for name, x in kwargs.items():
                if isinstance(x, _Tensor):
                    tensors.append(x)
                    names_of.append(name)
        found = known(tensors)
        if found is None:
            arrays, named = plain(args, kwargs)
            given = zip((*args, *kwargs.values()), (*arrays, *named.values()), strict=True)
            learn(tensors, [array for x, array in given if isinstance(x, _Tensor)])
            return arrays, named
        first = len(args) - places
        if names_of:
            kwargs.update(zip(names_of, found[places:], strict=True))
            found = found[:places]
        if not first:
            return found, kwargs
        if places and tensors[0] is args[first]:  # they come last
            return (*args[:first], *found), kwargs
        take = iter(found).__next__
        return [take() if isinstance(x, _Tensor) else x for x in args], kwargs

    return convert
