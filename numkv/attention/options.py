"""The options of attention: what callers pass by name, and the same checked, as one object."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple, TypedDict

from numkv.attention.sight import Sight, check_sight
from numkv.errors import DimensionMismatch
from numkv.keywords import meant
from numkv.numbers import LARGEST_SCALE, check_flag, check_scale, check_soft_cap, check_window
from numkv.targets.call import Call


class AttentionOptions(TypedDict, total=False):
    """Options that attention functions and methods accept by name; each documents its own.

    Attributes
    ----------
    sm_scale : float, optional
        What scores are multiplied by, any finite number; ``1 / sqrt(head_dim)`` if None.
    logits_soft_cap : float
        Scores become ``cap * tanh(score / cap)``, after scaling; 0 for no cap.
    window_left : int
        Earlier tokens that a query sees in addition to its own; -1 for all of them.
    sinks : array (num_q_heads,), optional
        Extra scores that join the denominator only; -inf is none.
    causal : bool
        Whether queries see no later tokens, as by default. Else they need not be cached tokens either.
    ranges : int32 or int64 array (num_tokens, 2), optional
        Tokens ``[begin, end)`` that each query sees in place of that, cut to the sequence.
    mask : uint32 or int32 array (num_tokens, words), optional
        Bits of the sequence's newest tokens, as many as it has queries, which each query sees; see `numkv.tree_mask`.
    alibi_slopes : float32 array (num_q_heads,), optional
        A slope times the distance is taken from scores, after the cap.

    Notes
    -----
    What queries see is drawn in docs/visibility.md. None is the default of each option.
    """

    sm_scale: float | None
    logits_soft_cap: float | None
    window_left: int | None
    sinks: Any
    causal: bool | None
    ranges: Any
    mask: Any
    alibi_slopes: Any


#: Names of all options, then of those that some calls accept: sums of attention, sums in a window, sums with sinks, and
#: calls in layers with a window of their own.
ALL = frozenset(AttentionOptions.__annotations__)
SCORES = frozenset(("sm_scale", "logits_soft_cap"))
IN_A_WINDOW = SCORES | {"window_left"}
WITH_SINKS = SCORES | {"sinks"}
OF_A_LAYER = ALL - {"window_left"}

_ARRAYS = frozenset(("sinks", "ranges", "mask", "alibi_slopes"))
_SIGHT = ALL - IN_A_WINDOW - WITH_SINKS


class CheckedOptions(NamedTuple):  # made in a third of the time of a frozen dataclass
    """The options of an attention call, from `check_options`.

    Attributes
    ----------
    sm_scale, logits_soft_cap, window_left : float or None, float, int
        See `AttentionOptions`.
    sinks : array (num_q_heads,) or None
        Sink logits, not checked.
    return_lse : bool
        Whether the lse is returned too.
    out : array or None
        The array for the output, not checked.
    sight : Sight or None
        The tokens that queries see, where causality and the window do not suffice; arrays not checked.
    """

    sm_scale: float | None = None
    logits_soft_cap: float = 0.0
    window_left: int = -1
    sinks: Any = None
    return_lse: bool = False
    out: Any = None
    sight: Sight | None = None

    def scale(self, head_dim: int) -> float:
        """What scores of rows of `head_dim` elements are multiplied by."""
        if self.sm_scale is not None:
            return self.sm_scale
        if head_dim == 0:
            raise DimensionMismatch(
                "`q`: expected a head_dim of at least 1, got 0", expected=1, actual=0
            )
        return 1.0 / math.sqrt(head_dim)


#: Options of a call that asks for none.
PLAIN = CheckedOptions()


def only_scaled(given: Mapping[str, Any], return_lse: Any) -> bool:
    """Return whether a call has no option but a scale, which is not checked, and defaults."""
    if return_lse is not False:
        return False
    for name, x in given.items():
        if not (
            name == "sm_scale"
            or (name == "logits_soft_cap" and type(x) is float and x == 0)
            or (name == "window_left" and type(x) is int and x == -1)
            or (x is None and name in ALL)
        ):
            return False
    return True


def check_options(
    given: Mapping[str, Any], return_lse: bool | None = False, out: Any = None, *,
    takes: frozenset[str] = ALL, window_left: int | None = -1,
) -> CheckedOptions:  # fmt: skip
    """Take the options of an attention call as one object, the numbers among them checked; None is the default of each.

    Arrays are checked by `numkv.attention.attend.attend`, which knows their shapes. Options that the call does not take
    are refused; `window_left` is that of a call that takes none.
    """
    if not takes.issuperset(given):
        raise _unknown(next(name for name in given if name not in takes), takes)
    if (
        window_left == -1 and out is None and only_scaled(given, return_lse)
        and given.get("sm_scale") is None
    ):  # fmt: skip
        return PLAIN  # what most calls of one token ask for
    sm_scale, cap = given.get("sm_scale"), given.get("logits_soft_cap", 0.0)
    sinks, window_left = given.get("sinks"), given.get("window_left", window_left)
    if sm_scale is not None and not (
        type(sm_scale) is float and -LARGEST_SCALE <= sm_scale <= LARGEST_SCALE
    ):
        sm_scale = check_scale(sm_scale)
    if type(cap) is not float or cap != 0:
        cap = check_soft_cap(cap, sm_scale)
    if type(window_left) is not int or not -1 <= window_left < 2**63:
        window_left = check_window(window_left)
    if return_lse is not True:
        return_lse = check_flag("return_lse", return_lse)
    sight = None if _SIGHT.isdisjoint(given) else check_sight(given, window_left)
    asked = (sm_scale, cap, window_left, sinks, return_lse, out, sight)
    return tuple.__new__(CheckedOptions, asked)  # in half the time of its own `__new__`


def _unknown(name: str, takes: frozenset[str]) -> TypeError:
    """Return the error for an option that a call does not take."""
    if name in ("window", "sliding_window"):
        return TypeError(
            f"`{name}`: expected `window_left`, earlier tokens that a query sees before its own; pass "
            f"window_left={name} - 1, or a LayerSpec with it to a PagedKVCache when it is made"
        )
    what = "that this call does not take" if name in ALL else "an unknown one"
    return TypeError(
        f"`{name}`: expected an argument of this call, got {what}"
        + (
            meant(name, (*sorted(takes), "return_lse", "out"))
            or f"; options are {', '.join(sorted(takes))}"
        )
    )


def is_free(options: CheckedOptions) -> bool:
    """Return whether the queries of a call need not be cached tokens."""
    return options.sight is not None and not options.sight.counts_tokens


def with_options(
    call: Call, arrays: tuple[Any, ...], asked: tuple[Any, ...], options: Mapping[str, Any]
) -> tuple[Call, tuple[Any, ...], tuple[Any, ...]]:
    """A call with the options that it was given by name, as targets run it."""
    if not options:
        return call, arrays, asked
    own = [x for name, x in options.items() if name in _ARRAYS]
    others = [x for name, x in options.items() if name not in _ARRAYS]
    return _with_names(call, tuple(options)), (*arrays, *own), (*asked, *others)


@functools.cache
def _with_names(call: Call, names: tuple[str, ...]) -> Call:
    arrays = (*call.arrays, *(name for name in names if name in _ARRAYS))
    options = (*call.options, *(name for name in names if name not in _ARRAYS))
    return Call(" ".join(arrays), " ".join(options), " ".join(call.arrays[i] for i in call.written))
