"""Layer groups: layers with the same window share a block table."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

__all__ = ["LayerGroup", "group_layers"]


class LayerGroup(NamedTuple):
    """Layers that share a block table."""

    window: int
    """Earlier tokens that a query of these layers attends to, -1 for all."""
    layers: list[int]
    """The layers. The i-th of each group lies in the i-th pool."""

    def first_visible(self, length: int) -> int:
        """First token that the newest of `length` tokens attends to; later tokens need no earlier one."""
        return 0 if self.window < 0 else max(0, length - 1 - self.window)


def group_layers(windows: Sequence[int]) -> list[LayerGroup]:
    """Split layers into groups of equal size, each with one window.

    Equal sizes give blocks of one size, so that all groups draw on one free list. The size is the greatest common
    divisor of the numbers of layers that share a window.

    Parameters
    ----------
    windows : sequence of int
        Window of each layer, -1 for all tokens.

    Returns
    -------
    list of LayerGroup
        Full attention first: its table is the longest, and prefixes are looked up by it.
    """
    by_window: dict[int, list[int]] = {}
    for layer, window in enumerate(windows):
        by_window.setdefault(window, []).append(layer)
    size = math.gcd(*(len(layers) for layers in by_window.values()))
    return [
        LayerGroup(window, by_window[window][i : i + size])
        for window in sorted(by_window)
        for i in range(0, len(by_window[window]), size)
    ]
