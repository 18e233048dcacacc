"""numkv's functions on tensors.

Each one takes what the function of `numkv` takes, with tensors in place of arrays, and returns tensors. Errors are
those of `numkv`. Where ``torch.compile`` traces a call, it becomes one of an operator: see `numkv.torch.operators`.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeVar

import torch

import numkv
from numkv.torch import operators
from numkv.torch.tensors import array_of, tensors_of

__all__ = [
    "append", "attention_weights", "decode_attention", "merge_states", "paged_append",
    "paged_decode_attention", "paged_prefill_attention", "paged_write", "prefill_attention", "rope_shift",
]  # fmt: skip

_F = TypeVar("_F", bound=Callable[..., Any])
_is_compiling = torch.compiler.is_compiling


def _on_tensors(function: _F, result: str = "") -> _F:
    """A function that takes and returns tensors; `result` names the argument that takes the first result."""
    names = tuple(inspect.signature(function).parameters)
    more = len(names)
    operator = operators.calls.get(function.__name__)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if operator is not None and _is_compiling():
            return operator(*args, **kwargs)
        arrays = [
            array_of(x, names[i] if i < more else f"argument {i}") for i, x in enumerate(args)
        ]
        named = {name: array_of(x, name) for name, x in kwargs.items()}
        found = function(*arrays, **named)
        out = kwargs.get(result)
        if isinstance(out, torch.Tensor):
            return (out, tensors_of(found[1])) if isinstance(found, tuple) else out
        return tensors_of(found)

    return call  # type: ignore[return-value]


append = _on_tensors(numkv.append)
attention_weights = _on_tensors(numkv.attention_weights)
decode_attention = _on_tensors(numkv.decode_attention, "out")
merge_states = _on_tensors(numkv.merge_states)
paged_append = _on_tensors(numkv.paged_append)
paged_decode_attention = _on_tensors(numkv.paged_decode_attention, "out")
paged_prefill_attention = _on_tensors(numkv.paged_prefill_attention, "out")
paged_write = _on_tensors(numkv.paged_write, "q_out")
prefill_attention = _on_tensors(numkv.prefill_attention, "out")
rope_shift = _on_tensors(numkv.rope_shift)
