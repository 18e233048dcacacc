"""The options of attention as one object, which every function and method passes on whole."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from numkv.attention.sight import Sight, check_sight
from numkv.errors import DimensionMismatch
from numkv.numbers import LARGEST_SCALE, check_flag, check_scale, check_soft_cap, check_window


class AttentionOptions(NamedTuple):  # made in a third of the time of a frozen dataclass
    """What a caller asks of attention beside the arrays; see `numkv.decode_attention`.

    Attributes
    ----------
    sm_scale : float or None
        What scores are multiplied by; None for ``1 / sqrt(head_dim)``.
    logits_soft_cap : float
        The bound that scores approach, or 0.
    window_left : int
        Earlier tokens that a query sees, or -1 for all.
    sinks : array (num_q_heads,) or None
        Sink logits, not checked.
    return_lse : bool
        Whether the lse is returned too.
    out : array or None
        What takes the output, not checked.
    sight : Sight or None
        What queries see, where causality and the window do not say it all; arrays not checked.
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


def check_options(
    sm_scale: float | None = None, logits_soft_cap: float | None = 0.0, window_left: int | None = -1,
    sinks: Any = None, return_lse: bool | None = False, out: Any = None, visible: Any = None,
) -> AttentionOptions:  # fmt: skip
    """Take the options of an attention call as one object, the numbers among them checked; None is the default of each.

    Arrays are checked by `numkv.attention.attend.attend`, which knows their shapes. `visible` has the names of
    `numkv.attention.sight.Visible`.
    """
    if (
        sm_scale is None and sinks is None and out is None and return_lse is False and not visible
        and type(logits_soft_cap) is float and logits_soft_cap == 0
        and type(window_left) is int and window_left == -1
    ):  # fmt: skip
        return PLAIN  # what most calls of one token ask for
    if sm_scale is not None and not (
        type(sm_scale) is float and -LARGEST_SCALE <= sm_scale <= LARGEST_SCALE
    ):
        sm_scale = check_scale(sm_scale)
    if type(logits_soft_cap) is not float or logits_soft_cap != 0:
        logits_soft_cap = check_soft_cap(logits_soft_cap, sm_scale)
    if type(window_left) is not int or not -1 <= window_left < 2**63:
        window_left = check_window(window_left)
    if return_lse is not True:
        return_lse = check_flag("return_lse", return_lse)
    sight = check_sight(visible, window_left) if visible else None
    given = (sm_scale, logits_soft_cap, window_left, sinks, return_lse, out, sight)
    return tuple.__new__(AttentionOptions, given)  # in half the time of its own `__new__`


#: Options of a call that asks for none.
PLAIN = AttentionOptions()
