"""Which argument was meant, where a call got a name that it does not take: `meant`, and what puts it into messages.

Other libraries call the same things otherwise. Python names the argument that it does not know, and no more; what is
added here costs nothing in calls that are right.
"""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])
_C = TypeVar("_C")

_OF_CALLS = "`window_left` of `decode_attention`: sliding_window - 1"
#: Other libraries' names of an argument, and numkv's names with their descriptions in messages.
_MEANINGS: list[tuple[str, dict[str, str]]] = [
    ("window window_size sliding_window", {
        "window_left": "`window_left`, earlier tokens that a query sees before its own: sliding_window - 1",
        "layers": "`layers`, a numkv.LayerSpec for each: `window_left` there is sliding_window - 1",
        "max_seq_len": _OF_CALLS,
        "capacity": _OF_CALLS,
        "max_blocks_per_seq": _OF_CALLS,
    }),
    ("capacity max_len max_length max_seq_len max_seqlen max_tokens max_cache_len n_ctx num_tokens seq_len", {
        "max_seq_len": "`max_seq_len`",
        "capacity": "`capacity`",
        "num_blocks": "`num_blocks`, of `block_size` tokens each",
        "max_blocks_per_seq": "`max_blocks_per_seq`, of `block_size` tokens each",
    }),
    ("dtype cache_dtype kv_dtype kv_cache_dtype quantization bits nbits", {
        "kind": '`kind`, such as kind="fp16" or kind="int8"',
    }),
    ("num_heads n_heads n_head heads nhead num_attention_heads", {
        "num_kv_heads": "`num_kv_heads`, the heads of K and V",
        "num_q_heads": "`num_q_heads`",
    }),
    ("n_kv_heads kv_heads n_head_kv num_key_value_heads num_heads_kv", {"num_kv_heads": "`num_kv_heads`"}),
    ("scale softmax_scale scaling", {"sm_scale": "`sm_scale`, which scores are multiplied by"}),
    ("layers n_layers n_layer num_hidden_layers", {"num_layers": "`num_layers`"}),
    ("dim head_size d_head embed_dim", {"head_dim": "`head_dim`"}),
    ("soft_cap softcap", {"logits_soft_cap": "`logits_soft_cap`"}),
    ("n_blocks num_pages", {"num_blocks": "`num_blocks`"}),
    ("is_causal", {"causal": "`causal`"}),
    ("attn_mask attention_mask", {
        "mask": "`mask`, a bit for each of the newest tokens, or `ranges`; padding is not stored and needs none",
    }),
    ("residual_length residual_window num_sink_tokens", {"full_precision": "`full_precision`, a FullPrecision"}),
    ("head_dim_v k_kind v_kind window_left windows chunk_size shares states full_precision key_bounds", {
        "layers": "`layers`, a numkv.LayerSpec for each, which says it",
    }),
    ("page_size", {"block_size": "`block_size`"}),
    ("device", {"target": '`target`: "cpu" or "cuda"'}),
    ("tokens input_ids", {"token_ids": "`token_ids`"}),
]  # fmt: skip
_NAMES = {name: meaning for names, meaning in _MEANINGS for name in names.split()}

_TYPE_ERROR = re.compile(
    r"(?P<name>\S+)\(\) (?:got an unexpected keyword argument '(?P<unknown>\w+)'(?:\. Did you mean '\w+'\?)?"
    r"|missing \d+ required .*)"
)


def meant(name: str, known: Collection[str]) -> str:
    """Return the text of a message after the name of an unknown argument.

    Parameters
    ----------
    name : str
        The name.
    known : collection of str
        The arguments of the call.

    Returns
    -------
    str
        Such as ``"; did you mean `kind`?"``; empty where nothing is like it.
    """
    said = [text for of, text in _NAMES.get(name, {}).items() if of in known]
    if not said:
        import difflib  # only for those who have mistyped something

        said = [f"`{near}`" for near in difflib.get_close_matches(name, known, 1, 0.7)]
    return f"; did you mean {' or '.join(said)}?" if said else ""


def explain(
    error: TypeError,
    function: Callable[..., Any],
    given: Iterable[str],
    shown: str,
) -> None:
    """Have the error of a call whose arguments do not fit say which ones were meant; others stay as they are.

    Parameters
    ----------
    error : TypeError
        What calling `function` raised.
    function : callable
        What was called.
    given : iterable of str
        Names that the caller passed.
    shown : str
        What users call `function`.
    """
    if type(error) is not TypeError or len(error.args) != 1 or type(error.args[0]) is not str:
        return
    found = _TYPE_ERROR.fullmatch(error.args[0])
    if found is None or found["name"] != function.__qualname__:
        return
    known = [p.name for p in inspect.signature(function).parameters.values() if p.name != "self"]
    said = shown + error.args[0].partition(". Did you mean")[0].removeprefix(found["name"])
    if found["unknown"]:
        said += meant(found["unknown"], known)
    else:
        for name in [name for name in given if name not in known][:1]:
            said += f"; it has no '{name}'" + meant(name, known)
    error.args = (said,)


def explained(function: _F) -> _F:
    """A function, or a method that `numkv.access` does not mark, that says which argument was meant.

    An ``__init__`` says it by the name of the class. It costs a frame and a dict in every call, about 100 ns: none of
    those that write or attend to a token have it.
    """

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            of_class = function.__name__ == "__init__"
            shown = type(args[0]).__name__ if of_class else function.__qualname__
            explain(error, function, kwargs, shown)
            raise

    return run  # type: ignore[return-value]


def explains(cls: type[_C]) -> type[_C]:
    """A class whose constructor says which argument was meant."""
    if inspect.isfunction(cls.__init__):  # another class's may be all that it has
        cls.__init__ = explained(cls.__init__)  # type: ignore[method-assign]
    return cls
