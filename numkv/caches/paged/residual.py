"""Full-precision tokens beside the codes of a `PagedKVCache`: the newest ones of each sequence, and the first ones.

Every layer that quantises has a *twin*: a layer behind the model's own, in floats, whose group has a window. So blocks
of full-precision rows come from the same pool, and all that is done with sequences (forks, prefixes, rollback, host
memory, files) is done with them too. All tokens are stored as codes at once. A query at position p reads in full the
tokens that are newer than ``p - window`` and the first ``num_sink_tokens``, and the others as codes, so that a
result depends neither on the steps in which a prompt came, nor on whether it was found.

Keys by channel have no scales before their token group is complete, so the group of the newest token is there in full:
their twin is a layer whose queries attend within chunks of a group. A query reads its own group in full, and those
before as codes, in a prompt as in decode. Codes are made of the twin's rows when a group is complete; should it be cut
and filled again, of the twin's rows again.

Sources: see `numkv.caches.full_precision`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from numkv.caches.layer_spec import FullPrecision
from numkv.compaction.moves import Relocation, relocate, slots_of
from numkv.errors import NotSupported
from numkv.kinds import Kind, kind

Ints = NDArray[np.int64]


class Residual(NamedTuple):
    """Which tokens of a `PagedKVCache` are kept in full precision.

    Attributes
    ----------
    kept : FullPrecision or None
        Newest tokens, a query's own included, first ones, and what they are stored in. None: the token groups of
        newest tokens alone, where keys are stored by channel, in fp32.
    layers : int
        Layers of the model; the twin of layer i is layer ``layers + i``.
    """

    kept: FullPrecision | None
    layers: int

    @property
    def window(self) -> int:
        """Newest tokens, a query's own included."""
        return 0 if self.kept is None else self.kept.window

    @property
    def sinks(self) -> int:
        """First tokens."""
        return 0 if self.kept is None else self.kept.num_sink_tokens

    @property
    def kind(self) -> Kind:
        """What they are stored in."""
        return kind("fp32" if self.kept is None or self.kept.kind is None else self.kept.kind)

    def plain(self) -> tuple[int, int, str]:
        """The same in numbers and names, for geometries and headers of files."""
        return self.window, self.sinks, self.kind.name

    def twin_window(self, window: int) -> int:
        """Earlier tokens that the twin of a layer with this window keeps for a query; it keeps its own always."""
        own = max(0, self.window - 1)
        return own if window < 0 else min(own, window)

    def refuse(self, name: str, remedy: str) -> None:
        """Refuse what knows one kind of rows in a layer."""
        what = "keys by channel, whose newest ones are" if self.kept is None else self.kept
        raise NotSupported(
            f"{name}: expected a cache without tokens in full precision, got one with {what}; {remedy}"
        )


def split(
    window: int, group: int, keeps: int, seen: Ints, positions: Ints, first: Ints
) -> tuple[Ints, Ints, Ints]:
    """The parts of what queries see: newest tokens in full, first tokens in full, and codes between.

    Parameters
    ----------
    window, group : int
        What is kept: newest tokens, a query's own included; or its own token group of so many, 0 if it is a window.
    keeps : int
        First tokens that the layer has in full.
    seen : int64 array (n, 2)
        Tokens that each query sees.
    positions : int64 array (n,)
        Of the queries.
    first : int64 array (n,)
        First token that each query's sequence still has in full, the first ones aside.

    Returns
    -------
    newest, sinks, codes : int64 array (n, 2)
        Ranges; ``[0, 0)`` for nothing.
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


def relocate_beside(
    table: NDArray[np.int32], kept: Ints, start: int, window: int, block_size: int, keeps: int
) -> Relocation:
    """Plan the table of a compacted sequence in a group that keeps first tokens; see `relocate`.

    Raises
    ------
    NotSupported
        If the newest tokens to keep are not there in full, or the first ones are not kept.
    """
    plan = relocate(table, kept, start, window, block_size)
    n, sinks = len(kept), min(keeps, len(kept))
    if not sinks:
        return plan
    if not np.array_equal(kept[:sinks], np.arange(sinks)):
        raise NotSupported(
            f"`keep`: expected the first {keeps} tokens among those to keep, as no others can be in full precision in "
            f"their place, got {kept[:4].tolist()}, …; keep tokens 0 to {keeps - 1}"
        )
    blocks = -(-n // block_size)
    stays = np.arange(blocks)
    first = max(0, n - 1 - window) // block_size
    stays = stays[(stays < -(-sinks // block_size)) | (stays >= first)]
    elsewhere = np.flatnonzero(kept != np.arange(n))
    same = int(elsewhere[0]) // block_size if len(elsewhere) else blocks
    new = np.full(blocks, -1, np.int32)
    new[stays] = table[stays]
    gone = np.ones(len(table), np.bool_)
    gone[stays] = False
    changed = stays[stays >= same]
    tokens = np.arange(n)
    there = (tokens < sinks) | (tokens >= max(plan.start, first * block_size))
    moved = tokens[there & np.isin(tokens // block_size, changed)]
    dropped = table[gone]
    source = slots_of(table, kept[moved], block_size)
    return Relocation(new, changed, dropped[dropped >= 0], plan.start, moved, source)
