"""Which shard holds what: kv heads are divided among *parts*, tokens among *columns*.

A shard stands in one column and holds one part of the heads: ``shard = column * parts + part``. With one column the
cache is sharded by heads, with one part by context, else by both.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from numkv.errors import DimensionMismatch
from numkv.numbers import check_size

#: Shards that a cache can have.
_MOST_SHARDS = 2**16


class Layout(NamedTuple):
    """A rectangle of shards; made by `Layout.of`."""

    columns: int
    """Among which tokens are divided."""
    bounds: tuple[int, ...]
    """First kv head of each part, and the number of all."""

    @classmethod
    def of(cls, num_kv_heads: int, heads: int, context: int) -> Layout:
        """Divide heads into parts that differ by one head at most.

        Parameters
        ----------
        num_kv_heads : int
            Kv heads of the model.
        heads : int
            Parts of them.
        context : int
            Columns.

        Returns
        -------
        Layout

        Raises
        ------
        DimensionMismatch
            If there are more parts than heads, or a number is no size.
        """
        parts = check_size("heads", heads, 1, _MOST_SHARDS)
        columns = check_size("context", context, 1, _MOST_SHARDS)
        if parts > num_kv_heads:
            raise DimensionMismatch(
                f"`heads`: expected at most as many parts as kv heads, {num_kv_heads}, got {parts}; divide the "
                "context too",
                expected=num_kv_heads,
                actual=parts,
            )
        return cls(columns, tuple(i * num_kv_heads // parts for i in range(parts + 1)))

    @property
    def parts(self) -> int:
        """Parts of the heads."""
        return len(self.bounds) - 1

    @property
    def num_shards(self) -> int:
        """Shards."""
        return self.columns * self.parts

    def kv_heads(self, part: int) -> slice:
        """The kv heads of a part."""
        return slice(self.bounds[part], self.bounds[part + 1])

    def q_heads(self, part: int, num_q_heads: int) -> slice:
        """The q heads that attend to the kv heads of a part."""
        group = num_q_heads // self.bounds[-1]
        return slice(self.bounds[part] * group, self.bounds[part + 1] * group)

    def column_of(self, shard: int) -> int:
        """The column of a shard."""
        return shard // self.parts

    def part_of(self, shard: int) -> int:
        """The part of the heads that a shard has."""
        return shard % self.parts

    def shards_of(self, column: int) -> Iterator[int]:
        """The shards of a column, by part."""
        return iter(range(column * self.parts, (column + 1) * self.parts))
