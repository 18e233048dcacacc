"""The rows and states that each layer of a model stores, and their bytes."""

from __future__ import annotations

import bisect
import functools
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from numkv.kinds import Kind, kinds_of
from numkv.numbers import check_flag, check_size

_BYTES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
}


@dataclass(frozen=True)
class Rows:
    """Rows that a layer stores: one of K and one of V for each token and kv head, or fewer.

    Attributes
    ----------
    what : str
        ``"keys and values"``, ``"latents"`` (whose first elements are V), ``"compressed keys"`` (which are also V),
        ``"index keys"``, or ``"keys and values of the text that is read"`` (cross attention).
    heads, dim, dim_v : int
        Kv heads, and elements of a row of K and of V; `dim_v` is 0 if V has no rows of its own.
    limit : int or None
        Most tokens that are stored, the newest included: a window or a chunk. None for no limit.
    tokens_per_row : int
        Tokens that share a row: 1, or more if the model compresses them.
    of_source : bool
        Whether rows belong to the tokens of a source text, such as an encoder's, and not to new tokens.
    latent_dim : int
        Number of first elements of a row of K that are V, in latent attention; else 0.
    """

    what: str
    heads: int
    dim: int
    dim_v: int
    limit: int | None = None
    tokens_per_row: int = 1
    of_source: bool = False
    latent_dim: int = 0

    def row_bytes(self, k_kind: Kind, v_kind: Kind) -> int:
        """Return the bytes of one row of all heads, scales included.

        Parameters
        ----------
        k_kind, v_kind : Kind
            Kinds of K and of V; latents and index keys are K.

        Returns
        -------
        int
        """
        row = k_kind.row_bytes(self.dim)
        return self.heads * (row + (v_kind.row_bytes(self.dim_v) if self.dim_v else 0))

    def bounds_bytes(self) -> int:
        """Return the bytes of the bounds of a block's keys, for sparse attention; 0 for rows other than K and V.

        Returns
        -------
        int
        """
        return 8 * self.heads * self.dim if self.dim_v and not self.of_source else 0

    def kept(self, tokens: int, block_size: int | None = None) -> int:
        """Return the number of tokens for which rows are allocated.

        Parameters
        ----------
        tokens : int
            Tokens of the sequence, or of the source text.
        block_size : int, optional
            Tokens in a block. Limited rows then need the most blocks of a decode step: a window that is not aligned to
            blocks, and the new token before old blocks are released.

        Returns
        -------
        int
        """
        size = block_size or 1
        blocks = -(-tokens // size)
        if self.limit is not None:
            blocks = min(blocks, -(-self.limit // size) + (block_size is not None))
        kept = blocks * size
        return kept if self.limit is None or block_size else min(kept, self.limit)


@dataclass(frozen=True)
class State:
    """A state of constant size that a layer stores for each sequence.

    Attributes
    ----------
    what : str
        ``"convolution"``, ``"recurrent"``, …
    numbers : int
        Number of its elements.
    dtype : str or None
        Their dtype; None for the model's.
    """

    what: str
    numbers: int
    dtype: str | None = None

    def nbytes(self, dtype: str) -> int:
        """Return the bytes in a model of some dtype.

        Parameters
        ----------
        dtype : str
            The model's, such as ``"bfloat16"``.

        Returns
        -------
        int
        """
        return self.numbers * _BYTES[self.dtype or dtype]


@dataclass(frozen=True)
class LayerNeeds:
    """The rows and states of one layer.

    Attributes
    ----------
    type : str
        Its type, as named in `layer_types` of transformers 5.
    rows : tuple of Rows
        Rows, which grow with tokens.
    states : tuple of State
        States of constant size.
    shares : int or None
        The layer whose rows it reads, if it has none of its own.
    """

    type: str
    rows: tuple[Rows, ...] = ()
    states: tuple[State, ...] = ()
    shares: int | None = None


@dataclass(frozen=True)
class ModelNeeds:
    """The rows and states that a model stores for each sequence; made by `needs_of`.

    Attributes
    ----------
    model_type : str
        The family named by the config; "" without a name.
    layers : tuple of LayerNeeds
        All layers, in order.
    dtype : str
        The model's dtype, which is also that of states without a dtype of their own.
    context : int or None
        The model's context length, if the config has it.
    remarks : tuple of str
        Names of unknown entries of the config, and the assumptions made instead.
    q_heads : int or None
        Query heads of a layer, if they are equal in all layers.
    parameters : int or None
        Number of weights, for families whose config determines it.
    """

    model_type: str
    layers: tuple[LayerNeeds, ...]
    dtype: str = "bfloat16"
    context: int | None = None
    remarks: tuple[str, ...] = ()
    q_heads: int | None = None
    parameters: int | None = None

    @property
    def weight_bytes(self) -> int | None:
        """Return the bytes of the weights in the model's dtype; None if they are unknown."""
        return None if self.parameters is None else self.parameters * _BYTES[self.dtype]

    @property
    def rows(self) -> tuple[Rows, ...]:
        """Return the rows of all layers."""
        return tuple(rows for layer in self.layers for rows in layer.rows)

    @functools.cached_property
    def _times(self) -> Counter[Rows]:
        """How often each of the rows occurs: models of many layers have few different ones."""
        return Counter(self.rows)

    @property
    def windows_full_at(self) -> int:
        """Return the sequence length at which the last window is full; 0 without windows."""
        return max((rows.limit or 0 for rows in self._times), default=0)

    def state_bytes(self) -> int:
        """Return the bytes of the states of one sequence.

        Returns
        -------
        int
        """
        return sum(state.nbytes(self.dtype) for layer in self.layers for state in layer.states)

    def bytes_per_token(
        self, k_kind: str | Kind, v_kind: str | Kind | None = None, *, tokens: int = 0
    ) -> int:
        """Return the bytes of one more token in all layers, scales included; shared rows count in part.

        Parameters
        ----------
        k_kind, v_kind : str or Kind
            Kinds of K and of V; V's is K's if None.
        tokens : int
            Tokens of the sequence so far; layers whose window is full do not grow.

        Returns
        -------
        int
            Bytes, rounded up.
        """
        tokens = check_size("tokens", tokens)
        growing = (
            rows
            for rows in self._times
            if not rows.of_source and (rows.limit is None or tokens < rows.limit)
        )
        return self._sum(growing, k_kind, v_kind, lambda rows: 1)

    def bytes_per_source_token(self, k_kind: str | Kind, v_kind: str | Kind | None = None) -> int:
        """Return the bytes of one token of the source text, in all layers with cross attention.

        Parameters
        ----------
        k_kind, v_kind : str or Kind
            Kinds of K and of V; V's is K's if None.

        Returns
        -------
        int
        """
        return self._sum((r for r in self._times if r.of_source), k_kind, v_kind, lambda rows: 1)

    def sequence_bytes(
        self,
        tokens: int,
        k_kind: str | Kind,
        v_kind: str | Kind | None = None,
        *,
        block_size: int | None = None,
        source_tokens: int = 0,
        key_bounds: bool = False,
    ) -> int:
        """Return the bytes of one sequence, states and scales included.

        Parameters
        ----------
        tokens : int
            Its tokens.
        k_kind, v_kind : str or Kind
            Kinds of K and of V; V's is K's if None.
        block_size : int, optional
            Tokens in a block, to which lengths are rounded up; exact lengths if None.
        source_tokens : int
            Tokens of the source text of cross attention.
        key_bounds : bool
            Whether bounds of keys are stored for each block, as by ``LayerSpec(key_bounds=True)``. It needs a
            `block_size`.

        Returns
        -------
        int

        Raises
        ------
        ValueError
            If `key_bounds` is set without `block_size`.

        Notes
        -----
        The scales of heads of 8-bit floats belong to the cache, not to a sequence, and are not counted. A prompt that
        is stored in one step needs all of its blocks in all layers until the step ends.
        """
        tokens = check_size("tokens", tokens)
        source_tokens = check_size("source_tokens", source_tokens)
        if block_size is not None:
            block_size = check_size("block_size", block_size, 1)

        def count(rows: Rows) -> int:
            return rows.kept(source_tokens if rows.of_source else tokens, block_size)

        bounds = 0
        if check_flag("key_bounds", key_bounds):
            if block_size is None:
                raise ValueError("`key_bounds`: expected False without `block_size`, got True")
            kept = (
                r.bounds_bytes() * (r.kept(tokens, block_size) // block_size) * times
                for r, times in self._times.items()
            )
            bounds = sum(kept)
        return self.state_bytes() + self._sum(self._times, k_kind, v_kind, count) + bounds

    def tokens_in(
        self,
        memory: int,
        k_kind: str | Kind,
        v_kind: str | Kind | None = None,
        *,
        block_size: int | None = None,
        source_tokens: int = 0,
        key_bounds: bool = False,
    ) -> int | None:
        """Return the tokens of one sequence that fit into some memory.

        Parameters
        ----------
        memory : int
            Bytes of memory.
        k_kind, v_kind, block_size, source_tokens, key_bounds
            See `sequence_bytes`.

        Returns
        -------
        int or None
            None if any number fits, because nothing grows without limit; 0 if not one fits.
        """

        def cost(tokens: int) -> int:
            return self.sequence_bytes(
                tokens, k_kind, v_kind, block_size=block_size, source_tokens=source_tokens,
                key_bounds=key_bounds,
            )  # fmt: skip

        high = max(1, self.windows_full_at + (block_size or 0))
        grows = any(rows.limit is None and not rows.of_source for rows in self._times)
        if not grows and cost(high) <= memory:
            return None
        while cost(high) <= memory:
            high *= 2
        return bisect.bisect_right(range(high), memory, lo=1, key=cost) - 1

    def _sum(
        self,
        rows: Iterable[Rows],
        k_kind: str | Kind,
        v_kind: str | Kind | None,
        count: Callable[[Rows], int],
    ) -> int:
        """Return the bytes of different rows, each multiplied by its `count` and by how often it occurs."""
        k, v = kinds_of(k_kind, None, v_kind, by_channel=True)
        shared: dict[int, int] = {}  # by the number of tokens that share a row
        for one in rows:
            cost = one.row_bytes(k, v) * count(one) * self._times[one]
            shared[one.tokens_per_row] = shared.get(one.tokens_per_row, 0) + cost
        return sum(-(-cost // tokens) for tokens, cost in shared.items())
