"""What a model keeps of the tokens that it has seen, layer by layer, and what that costs in bytes."""

from __future__ import annotations

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
    """Rows that a layer keeps: one of K and one of V for each token and kv head, or fewer.

    Attributes
    ----------
    what : str
        ``"keys and values"``, ``"latents"`` (of which V is a part), ``"compressed keys"`` (which are V, too),
        ``"index keys"``, or ``"keys and values of the text that is read"`` (cross attention).
    heads, dim, dim_v : int
        Kv heads, and elements of a row of K and of V; `dim_v` is 0 where V needs no rows of its own.
    limit : int or None
        Tokens that are kept at most, the newest included: a window or a chunk. None: all.
    tokens_per_row : int
        Tokens that share a row: 1, or more where the model compresses them.
    of_source : bool
        Whether there is a row for each token of the text that is read, such as an encoder's, and none for new tokens.
    latent_dim : int
        The first elements of a row of K that are V, in latent attention; else 0.
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
        """Bytes of one row of all heads, scales included.

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
        """Bytes of the bounds of a block's keys, for sparse reading; 0 of what is no K and V.

        Returns
        -------
        int
        """
        return 8 * self.heads * self.dim if self.dim_v and not self.of_source else 0

    def kept(self, tokens: int, block_size: int | None = None) -> int:
        """Return how many tokens' rows there is room for when a sequence has some tokens.

        Parameters
        ----------
        tokens : int
            Tokens of the sequence, or of the text that is read.
        block_size : int, optional
            Tokens in a block. Limited rows then take as many blocks as a decode step may need: a window that lies
            askew, and the new token before what falls out is given back.

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
    """Numbers that a layer keeps for a sequence, however long it is.

    Attributes
    ----------
    what : str
        ``"convolution"``, ``"recurrent"``, …
    numbers : int
        How many.
    dtype : str or None
        Their dtype; None: that of the model.
    """

    what: str
    numbers: int
    dtype: str | None = None

    def nbytes(self, dtype: str) -> int:
        """Bytes, in a model of some dtype.

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
    """What one layer keeps.

    Attributes
    ----------
    type : str
        Its type, in the words of `layer_types` of transformers 5.
    rows : tuple of Rows
        What grows with tokens.
    states : tuple of State
        What does not.
    shares : int or None
        The layer whose rows it reads, having none of its own.
    """

    type: str
    rows: tuple[Rows, ...] = ()
    states: tuple[State, ...] = ()
    shares: int | None = None


@dataclass(frozen=True)
class ModelNeeds:
    """What a model keeps of each sequence; made by `needs_of`.

    Attributes
    ----------
    model_type : str
        As the config names it; "" where it does not.
    layers : tuple of LayerNeeds
        From the first layer to the last.
    dtype : str
        The model's, in which states are kept that have no dtype of their own.
    context : int or None
        Tokens that the model was made for, if the config says.
    remarks : tuple of str
        Entries of the config that were not understood, by name, and what is assumed instead.
    q_heads : int or None
        Query heads of a layer, if all have as many.
    parameters : int or None
        Numbers in the weights, of families whose config says all of them.
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
        """Bytes of the weights in the model's dtype; None if they are not known."""
        return None if self.parameters is None else self.parameters * _BYTES[self.dtype]

    @property
    def rows(self) -> tuple[Rows, ...]:
        """The rows of all layers."""
        return tuple(rows for layer in self.layers for rows in layer.rows)

    @property
    def windows_full_at(self) -> int:
        """Tokens from which on no limited row grows any more; 0 without limits."""
        return max((rows.limit or 0 for rows in self.rows), default=0)

    def state_bytes(self) -> int:
        """Bytes of the states of one sequence.

        Returns
        -------
        int
        """
        return sum(state.nbytes(self.dtype) for layer in self.layers for state in layer.states)

    def bytes_per_token(
        self, k_kind: str | Kind, v_kind: str | Kind | None = None, *, tokens: int = 0
    ) -> int:
        """Bytes that one more token costs in all layers, scales included, rows that tokens share by their share.

        Parameters
        ----------
        k_kind, v_kind : str or Kind
            Kinds of K and of V; V's is K's if None.
        tokens : int
            Tokens of the sequence so far: layers whose limit they reach grow no more.

        Returns
        -------
        int
            Rounded up.
        """
        tokens = check_size("tokens", tokens)
        growing = (
            rows
            for rows in self.rows
            if not rows.of_source and (rows.limit is None or tokens < rows.limit)
        )
        return self._sum(growing, k_kind, v_kind, lambda rows: 1)

    def bytes_per_source_token(self, k_kind: str | Kind, v_kind: str | Kind | None = None) -> int:
        """Bytes that a token of the text that is read across costs in all layers.

        Parameters
        ----------
        k_kind, v_kind : str or Kind
            Kinds of K and of V; V's is K's if None.

        Returns
        -------
        int
        """
        return self._sum((r for r in self.rows if r.of_source), k_kind, v_kind, lambda rows: 1)

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
        """Bytes of one sequence, states and scales included.

        Parameters
        ----------
        tokens : int
            Its tokens.
        k_kind, v_kind : str or Kind
            Kinds of K and of V; V's is K's if None.
        block_size : int, optional
            Tokens in a block, to which lengths are rounded up; exact lengths if None.
        source_tokens : int
            Tokens of the text that it reads by cross attention.
        key_bounds : bool
            Whether bounds of keys are stored next to the blocks, as by ``LayerSpec(key_bounds=True)``. It needs a
            `block_size`.

        Returns
        -------
        int

        Raises
        ------
        ValueError
            If bounds are asked for without blocks.

        Notes
        -----
        Scales of heads, of the 8-bit floats, are the cache's and not a sequence's; they are not counted. A prompt
        that is stored in one step takes all of its blocks in all layers until the step ends.
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
                r.bounds_bytes() * (r.kept(tokens, block_size) // block_size) for r in self.rows
            )
            bounds = sum(kept)
        return self.state_bytes() + self._sum(self.rows, k_kind, v_kind, count) + bounds

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
        """Tokens of one sequence that fit.

        Parameters
        ----------
        memory : int
            Bytes.
        k_kind, v_kind, block_size, source_tokens, key_bounds
            See `sequence_bytes`.

        Returns
        -------
        int or None
            None if any number fits, as nothing grows without limit; 0 if not even one does.
        """

        def cost(tokens: int) -> int:
            return self.sequence_bytes(
                tokens, k_kind, v_kind, block_size=block_size, source_tokens=source_tokens,
                key_bounds=key_bounds,
            )  # fmt: skip

        high = max(1, self.windows_full_at + (block_size or 0))
        if (
            not any(rows.limit is None and not rows.of_source for rows in self.rows)
            and cost(high) <= memory
        ):
            return None
        low = 0
        while cost(high) <= memory:
            low, high = high, high * 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if cost(middle) <= memory else (low, middle)
        return low

    def _sum(
        self,
        rows: Iterable[Rows],
        k_kind: str | Kind,
        v_kind: str | Kind | None,
        count: Callable[[Rows], int],
    ) -> int:
        """Bytes of some rows, each as often as `count` says."""
        k, v = kinds_of(k_kind, None, v_kind, by_channel=True)
        shared: dict[int, int] = {}  # by the number of tokens that share a row
        for one in rows:
            cost = one.row_bytes(k, v) * count(one)
            shared[one.tokens_per_row] = shared.get(one.tokens_per_row, 0) + cost
        return sum(-(-cost // tokens) for tokens, cost in shared.items())
