"""The options of attention as one object, which every function and method passes on whole."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

__all__ = ["AttentionOptions", "check_options"]


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
    """

    sm_scale: float | None = None
    logits_soft_cap: float = 0.0
    window_left: int = -1
    sinks: Any = None
    return_lse: bool = False
    out: Any = None

    def scale(self, head_dim: int) -> float:
        """What scores of rows of `head_dim` elements are multiplied by."""
        return 1.0 / math.sqrt(head_dim) if self.sm_scale is None else float(self.sm_scale)


def check_options(
    sm_scale: float | None = None, logits_soft_cap: float = 0.0, window_left: int = -1,
    sinks: Any = None, return_lse: bool = False, out: Any = None,
) -> AttentionOptions:  # fmt: skip
    """Take the options of an attention call as one object, the numbers among them checked.

    Arrays are checked by `numkv.attention.attend.attend`, which knows their shapes.
    """
    if logits_soft_cap != 0 or window_left != -1:
        if logits_soft_cap is None or logits_soft_cap < 0 or not math.isfinite(logits_soft_cap):
            raise ValueError(
                f"`logits_soft_cap`: expected a finite number, 0 for none, got {logits_soft_cap!r}"
            )
        if window_left < -1:
            raise ValueError(
                f"`window_left`: expected a number of earlier tokens, or -1 for all, got {window_left}"
            )
    elif sm_scale is None and sinks is None and out is None and not return_lse:
        return _NONE  # what most calls of one token ask for
    given = (sm_scale, logits_soft_cap, window_left, sinks, return_lse, out)
    return tuple.__new__(AttentionOptions, given)  # in half the time of its own `__new__`


_NONE = AttentionOptions()
