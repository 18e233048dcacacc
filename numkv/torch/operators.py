"""numkv's functions as operators of PyTorch, ``torch.ops.numkv``, for ``torch.compile``, ``torch.export`` and graphs.

Each function is an operator of the same name; what varies its results has a name of its own:

=================================  =====================================================================
``decode_attention``               returns the output
``decode_attention.lse``           returns the output and the lse
``decode_attention.out``           writes the output to `out`, returns nothing
``decode_attention.lse_out``       writes the output to `out`, returns the lse
=================================  =====================================================================

and likewise ``prefill_attention``, ``paged_decode_attention`` and ``paged_prefill_attention``. ``append``,
``paged_append`` and ``paged_write`` say in their schemas what they write; ``paged_write.out`` has a `q_out`. Each has
a kernel for the CPU, one for CUDA and a fake one, which returns shapes and dtypes. None has a formula for gradients,
and inputs that require them are refused.

On CUDA all tensors are on one device, and kernels run on the stream that PyTorch has current there, whatever
`numkv.on_stream` says: choose it by ``torch.cuda.stream``. Outputs are memory of PyTorch's, but for the lse, and for
what ``merge_states`` and ``attention_weights`` return. In a CUDA graph use ``.out`` operators and those that write:
they launch kernels and nothing else. The others can be captured too, and have memory of the graph. Call each once
before, so that its kernels are there.

The functions of `numkv.torch` call these where they are traced, and go past them otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import numkv
from numkv.torch.tensors import converter, on_tensors, refuse_gradient, tensors_of

_OPTIONS = (
    "float? sm_scale=None, float logits_soft_cap=0.0, int window_left=-1, Tensor? sinks=None, "
    "Tensor? k_scale=None, Tensor? v_scale=None"
)
# Arguments of attention by position, by function.
_ATTENTION = {
    "decode_attention": ("q", "k", "v", "seq_lens"),
    "prefill_attention": ("q", "k", "v", "seq_lens", "cu_seqlens_q"),
    "paged_decode_attention": ("q", "k_pool", "v_pool", "block_table", "seq_lens"),
    "paged_prefill_attention": (
        "q", "k_pool", "v_pool", "block_table", "seq_lens", "cu_seqlens_q",
    ),
}  # fmt: skip
_OTHERS = {
    "append": (
        "Tensor k_new, Tensor v_new, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor cache_offsets",
        "()",
    ),
    "paged_append": (
        "Tensor k, Tensor v, Tensor(a!) k_pool, Tensor(b!) v_pool, Tensor slot_mapping, *, "
        "Tensor(c!)? k_scale=None, Tensor(d!)? v_scale=None, bool check_finite=True",
        "()",
    ),
    "paged_write": (
        "Tensor qkv, Tensor(a!) k_pool, Tensor(b!) v_pool, Tensor slot_mapping, *, int num_q_heads, "
        "Tensor? positions=None, Tensor? cos=None, Tensor? sin=None, int qk_mode, "
        "Tensor? q_norm_weight=None, Tensor? k_norm_weight=None, float eps=1e-06, "
        "Tensor(c!)? k_scale=None, Tensor(d!)? v_scale=None, bool check_finite=True",
        "Tensor",
    ),
    "merge_states": (
        "Tensor o_a, Tensor lse_a, Tensor o_b, Tensor lse_b",
        "(Tensor, Tensor)",
    ),
    "attention_weights": (
        "Tensor q, Tensor k, Tensor seq_lens, Tensor? cu_seqlens_q=None, *, Tensor? lse=None, "
        "float? sm_scale=None, float logits_soft_cap=0.0, int window_left=-1, Tensor? k_scale=None",
        "Tensor",
    ),
}

_library = torch.library.Library("numkv", "DEF")  # operators live as long as it does


def _on_its_stream(run: Callable[..., Any]) -> Callable[..., Any]:
    """A kernel for CUDA, on the stream that PyTorch has current: what comes next in a trace waits for no other."""

    def on_cuda(*args: Any, **options: Any) -> Any:
        with numkv.on_stream(None):
            return run(*args, **options)

    return on_cuda


def _define(
    name: str, schema: str, run: Callable[..., Any], fake: Callable[..., Any], on_cuda: Callable[..., Any] | None = None
) -> None:  # fmt: skip
    """Add an operator with its kernels for the CPU and for CUDA, and its fake one."""
    _library.define(f"{name}{schema}", tags=(torch.Tag.needs_fixed_stride_order,))
    _library.impl(name, run, "CPU")
    _library.impl(name, _on_its_stream(run if on_cuda is None else on_cuda), "CUDA")
    torch.library.register_fake(f"numkv::{name}", fake, lib=_library)


def _dropped(run: Callable[..., Any]) -> Callable[..., None]:
    """A kernel without a result, which is in an argument."""

    def call(*args: Any, **options: Any) -> None:
        run(*args, **options)

    return call


def _no_gradients(**tensors: Any) -> None:
    """Refuse inputs whose gradients are being recorded, as the kernels do."""
    for name, x in tensors.items():
        if x is not None:
            refuse_gradient(x, name)


def _value_dim(v: Any, scale: Any) -> Any:
    """Elements of a V row; INT4 has two in a word."""
    return v.shape[3] * 2 if v.dtype == torch.uint8 and scale is not None else v.shape[3]


def _define_attention(name: str, inputs: tuple[str, ...]) -> None:
    function = getattr(numkv, name)
    tensors = ", ".join(f"Tensor {x}" for x in inputs)

    convert = converter(inputs, keeps=False)

    def called(*args: Any, **options: Any) -> Any:
        arrays, named = convert(args, options)
        return function(*arrays, **named)

    def run(*args: Any, **options: Any) -> Any:
        return tensors_of(called(*args, **options))

    def run_lse(*args: Any, **options: Any) -> Any:
        return run(*args, return_lse=True, **options)

    def run_lse_out(*args: Any, **options: Any) -> Any:
        return tensors_of(called(*args, return_lse=True, **options)[1])

    def fake(*args: Any, v_scale: Any = None, **options: Any) -> Any:
        _no_gradients(**dict(zip(inputs, args, strict=True)))
        q, v = args[0], args[2]
        return q.new_empty((q.shape[0], q.shape[1], _value_dim(v, v_scale)))

    def run_cuda(*args: Any, **options: Any) -> Any:
        out = fake(*args, **options)  # a tensor like the real one: of these there is one
        called(*args, out=out, **options)
        return out

    def fake_lse(*args: Any, **options: Any) -> Any:
        return fake(*args, **options), args[0].new_empty(args[0].shape[:2], dtype=torch.float32)

    def fake_lse_out(*args: Any, **options: Any) -> Any:
        return fake_lse(*args, **options)[1]

    with_out = f"({tensors}, *, {_OPTIONS}, Tensor(a!) out)"
    _define(name, f"({tensors}, *, {_OPTIONS}) -> Tensor", run, fake, run_cuda)
    _define(f"{name}.lse", f"({tensors}, *, {_OPTIONS}) -> (Tensor, Tensor)", run_lse, fake_lse)
    _define(f"{name}.out", f"{with_out} -> ()", _dropped(called), _dropped(fake))
    _define(f"{name}.lse_out", f"{with_out} -> Tensor", run_lse_out, fake_lse_out)


def _fake_write(qkv: Any, k_pool: Any, *args: Any, num_q_heads: int, **options: Any) -> Any:
    _no_gradients(qkv=qkv)
    packed = k_pool.dtype == torch.uint8 and options.get("k_scale") is not None
    dim = k_pool.shape[3] * (2 if packed else 1)
    return qkv.new_empty((qkv.shape[0], num_q_heads, dim))


def _fake_merge(o_a: Any, lse_a: Any, o_b: Any, lse_b: Any) -> Any:
    _no_gradients(o_a=o_a, lse_a=lse_a, o_b=o_b, lse_b=lse_b)
    return torch.empty_like(o_a), torch.empty_like(lse_a)


def _fake_weights(q: Any, k: Any, *args: Any, **options: Any) -> Any:
    _no_gradients(q=q, k=k)
    return q.new_empty(k.shape[:3], dtype=torch.float32)


def _fake_nothing(k: Any, v: Any, *args: Any, **options: Any) -> None:
    _no_gradients(k=k, v=v)


_FAKES: dict[str, Callable[..., Any]] = {
    "append": _fake_nothing,
    "paged_append": _fake_nothing,
    "paged_write": _fake_write,
    "merge_states": _fake_merge,
    "attention_weights": _fake_weights,
}


def _positional(inputs: str) -> tuple[str, ...]:
    """Names of the positional arguments of a schema."""
    found = inputs.partition("*, ")[0].strip(", ").split(", ")
    return tuple(part.split("=")[0].split()[-1] for part in found)


def _define_other(name: str, inputs: str, result: str) -> None:
    function = getattr(numkv, name)
    convert = converter(_positional(inputs), keeps=False)

    def run(*args: Any, **options: Any) -> Any:
        arrays, named = convert(args, options)
        return tensors_of(function(*arrays, **named))

    def write_cuda(*args: Any, **options: Any) -> Any:
        out = _fake_write(*args[:2], **options)
        run(*args, q_out=out, **options)
        return out

    writes = name == "paged_write"
    _define(name, f"({inputs}) -> {result}", run, _FAKES[name], write_cuda if writes else None)
    if writes:
        with_out = f"({inputs}, Tensor(e!) q_out) -> ()"
        _define(f"{name}.out", with_out, _dropped(run), _dropped(_fake_write))


for _name, _inputs in _ATTENTION.items():
    _define_attention(_name, _inputs)
for _name, (_inputs_of, _result) in _OTHERS.items():
    _define_other(_name, _inputs_of, _result)


# -- calls of operators that look like those of functions


# So that the error comes from here, not out of a trace.
_refuse_gradient = torch.compiler.disable(refuse_gradient)


def _tensors(names: tuple[str, ...], inputs: tuple[Any, ...], options: dict[str, Any]) -> list[Any]:
    """Tensors of tensors, lists, arrays and numbers; `options` are changed."""
    for name, x in options.items():
        if isinstance(x, list | tuple | np.ndarray):
            options[name] = torch.as_tensor(np.asarray(x))
    found = [
        x if x is None or isinstance(x, torch.Tensor) else torch.as_tensor(np.asarray(x))
        for x in inputs
    ]
    for name, x in zip(names, found, strict=False):
        if x is not None and x.requires_grad and torch.is_grad_enabled():
            _refuse_gradient(x, name)
    return found


def _attention_call(name: str, names: tuple[str, ...]) -> Callable[..., Any]:
    operator = getattr(torch.ops.numkv, name)
    known = {*names, *_positional(_OPTIONS)}
    outside = on_tensors(getattr(numkv, name))

    def call(
        *inputs: Any,
        return_lse: bool = False,
        out: Any = None,
        logits_soft_cap: float | None = 0.0,
        window_left: int | None = -1,
        validate: bool = False,
        **options: Any,
    ) -> Any:
        options["logits_soft_cap"] = 0.0 if logits_soft_cap is None else logits_soft_cap
        options["window_left"] = -1 if window_left is None else window_left
        if not known.issuperset(options):  # masks and the like: the graph ends here
            return outside(*inputs, return_lse=return_lse, out=out, **options)
        inputs = tuple(_tensors(names, inputs, options))
        if out is None:
            return (operator.lse if return_lse else operator.default)(*inputs, **options)
        if return_lse:
            return out, operator.lse_out(*inputs, **options, out=out)
        operator.out(*inputs, **options, out=out)
        return out

    return call


def _other_call(name: str, inputs_of: str) -> Callable[..., Any]:
    names = _positional(inputs_of)
    operator = getattr(torch.ops.numkv, name)
    defaults = {"logits_soft_cap": 0.0, "window_left": -1, "eps": 1e-6, "check_finite": True}

    def call(*inputs: Any, q_out: Any = None, validate: bool = False, **options: Any) -> Any:
        options |= {x: value for x, value in defaults.items() if options.get(x, value) is None}
        if "qk_mode" in options:
            options["qk_mode"] = int(options["qk_mode"])
        if q_out is None:
            return operator.default(*_tensors(names, inputs, options), **options)
        operator.out(*_tensors(names, inputs, options), **options, q_out=q_out)
        return q_out

    return call


#: Calls of operators by the name of the function, with its arguments.
calls: dict[str, Callable[..., Any]] = {
    **{name: _attention_call(name, names) for name, names in _ATTENTION.items()},
    **{name: _other_call(name, inputs) for name, (inputs, _) in _OTHERS.items()},
}
