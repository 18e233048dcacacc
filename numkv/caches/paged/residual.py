"""Full-precision tokens of a quantised `PagedKVCache`: the newest ones of each sequence, and the first ones.

Every quantised layer has a *twin*: a float layer behind the model's own layers, whose group has a window. Blocks of
full-precision vectors therefore come from the same pool. Forks, prefixes, rollback, host memory and files treat them
like any other block.

All tokens are quantised at once. A query at position p reads two ranges in full precision: the tokens newer than
``p - window``, and the first ``num_sink_tokens``. It reads the other tokens as codes. A result therefore does not
depend on how a prompt was split into steps, or on prefix-cache hits.

Keys by channel have no scales until their token group is complete. The newest token's group is therefore stored in full
precision: its twin is a layer whose queries attend within chunks of one group. A query reads its own group in full
precision and earlier groups as codes, in prompts and in decode. Keys are quantised from the twin's vectors when a group
is complete. A group that is truncated and filled again is quantised from them again.

Sources: see `numkv.caches.full_precision`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from numkv.caches.layer_spec import FullPrecision
from numkv.errors import NotSupported
from numkv.kinds import Kind, kind

Ints = NDArray[np.int64]


class Residual(NamedTuple):
    """Which tokens of a `PagedKVCache` are kept in full precision.

    Attributes
    ----------
    kept : FullPrecision or None
        Number of newest tokens (a query's own included), number of first tokens, and their storage kind. With None and
        keys by channel, the newest token groups are stored in fp32.
    layers : int
        Layers of the model. The twin of layer i is layer ``layers + i``.
    """

    kept: FullPrecision | None
    layers: int

    @property
    def window(self) -> int:
        """Return the number of newest tokens, a query's own included."""
        return 0 if self.kept is None else self.kept.window

    @property
    def sinks(self) -> int:
        """Return the number of first tokens."""
        return 0 if self.kept is None else self.kept.num_sink_tokens

    @property
    def kind(self) -> Kind:
        """Return the storage kind of full-precision tokens."""
        return kind("fp32" if self.kept is None or self.kept.kind is None else self.kept.kind)

    def plain(self) -> tuple[int, int, str]:
        """Return window, first tokens and kind as plain values, for geometries and file headers."""
        return self.window, self.sinks, self.kind.name

    def twin_window(self, window: int) -> int:
        """Return how many tokens before a query's own the twin of a layer with this window keeps."""
        own = max(0, self.window - 1)
        return own if window < 0 else min(own, window)

    def refuse(self, name: str, remedy: str) -> None:
        """Raise for an operation that supports one kind of vectors per layer."""
        what = "keys by channel, whose newest ones are" if self.kept is None else self.kept
        raise NotSupported(
            f"{name}: expected a cache without tokens in full precision, got one with {what}; {remedy}"
        )


def split(
    window: int, group: int, keeps: int, seen: Ints, positions: Ints, first: Ints
) -> tuple[Ints, Ints, Ints]:
    """Split what queries see: newest tokens in full precision, first tokens in full precision, codes between.

    Parameters
    ----------
    window, group : int
        The newest full-precision tokens, a query's own included. The tokens of a group if keys are by channel, or 0
        for a window.
    keeps : int
        The layer's first tokens in full precision.
    seen : int64 array (n, 2)
        Range of tokens that each query sees.
    positions : int64 array (n,)
        Position of each query.
    first : int64 array (n,)
        First token that each query's sequence still has in full precision, apart from the first ones.

    Returns
    -------
    newest, sinks, codes : int64 array (n, 2)
        Ranges; an empty one is ``[0, 0)``.
    """
    low, high = seen[:, 0], seen[:, 1]
    newest_from = positions // group * group if group else positions + 1 - window
    begin = np.maximum(np.maximum(newest_from, first), keeps)
    parts = (
        (np.maximum(low, begin), high),
        (low, np.minimum(high, keeps)),
        (np.maximum(low, keeps), np.minimum(high, begin)),
    )
    newest, sinks, codes = (
        np.where((a < b)[:, None], np.stack([a, b], 1), 0).astype(np.int64) for a, b in parts
    )
    return newest, sinks, codes
