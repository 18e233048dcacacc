"""The operations of compressed heads; see `numkv.kernels.operations`."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from numkv.arrays import Array


class Codebook(NamedTuple):
    """What codes of some heads mean; see `OperationsOfCodes.encode_rows`.

    Attributes
    ----------
    rotation, back : float32 array (num_heads, head_dim, head_dim)
        The rotations, and their transposes.
    levels, v_levels : float32 array (2 ** bits,)
        Levels of keys, and of values.
    sketch : float32 array (num_heads, head_dim, projections)
        Directions of the sketch.
    """

    rotation: Array
    back: Array
    levels: Array
    v_levels: Array
    sketch: Array


class Sequences(NamedTuple):
    """Several sequences whose tokens lie in blocks: token t of one in its block ``t // block_size``. On the host.

    Attributes
    ----------
    lengths : int64 array (num_seqs,)
        Tokens of each.
    query_lens : int64 array (num_seqs,)
        Queries of each, those of its newest tokens.
    blocks : int64 array
        The blocks of all, one sequence after the other; block b has the tokens from ``b * block_size`` of the buffers.
    starts : int64 array (num_seqs,)
        Where each sequence's blocks start.
    block_size : int
        Tokens of a block: a multiple of 128.
    """

    lengths: np.ndarray[Any, np.dtype[np.int64]]
    query_lens: np.ndarray[Any, np.dtype[np.int64]]
    blocks: np.ndarray[Any, np.dtype[np.int64]]
    starts: np.ndarray[Any, np.dtype[np.int64]]
    block_size: int


class StoredCodes(NamedTuple):
    """Encoded keys and values of a sequence, or of several; see `OperationsOfCodes.encode_rows`.

    Attributes
    ----------
    k_codes, k_scales, signs, residuals
        Keys.
    v_codes, v_scales
        Values, which have no sketch.
    begin, end : int
        The tokens of one sequence, at least one.
    sequences : Sequences, optional
        Which tokens instead, for attention.
    """

    k_codes: Array
    k_scales: Array
    signs: Array
    residuals: Array
    v_codes: Array
    v_scales: Array
    begin: int
    end: int
    sequences: Sequences | None = None


class CodesOptions(NamedTuple):
    """What is asked of scores; see `numkv.decode_attention`.

    Attributes
    ----------
    sm_scale : float
        What scores are multiplied by.
    logits_soft_cap : float
        The bound that they approach then, or 0.
    window_left : int
        Earlier tokens that a query sees, or -1 for all.
    """

    sm_scale: float
    logits_soft_cap: float = 0.0
    window_left: int = -1


class OperationsOfCodes:
    """Those of a target's operations that encode rows, and read what is encoded."""

    @staticmethod
    def attend_codes(
        q: Array, q_kind: str, book: Codebook, stored: StoredCodes, options: CodesOptions, out: Array, lse: Array
    ) -> None:  # fmt: skip
        """Attend with queries over encoded keys and values, on the codes.

        Parameters
        ----------
        q : array (num_queries, num_q_heads, head_dim)
            Queries of the newest tokens, at most as many as are stored, in the words of `q_kind`; several q heads in a
            row share a head of the codes. Those of several sequences come one sequence after the other; one of a
            sequence without tokens gets zeros, and -inf.
        q_kind : str
            Their kind.
        book : Codebook
            What the codes mean.
        stored : StoredCodes
            Keys and values.
        options : CodesOptions
            What is asked of scores. Queries see no later tokens.
        out : float32 array (num_queries, num_q_heads, head_dim)
            Takes the result.
        lse : float32 array (num_queries, num_q_heads) or (0, 0)
            Takes the natural logs of the sums of exponentials, if it is not empty.
        """
        raise NotImplementedError

    @staticmethod
    def decode_rows(
        codes: Array, scales: Array, begin: int, levels: Array, back: Array, out: Array
    ) -> None:
        """Turn codes back into rows.

        Parameters
        ----------
        codes : uint8 array (num_heads, capacity, row_bytes)
            Codes.
        scales : float32 array (num_heads, capacity)
            Their scales.
        begin : int
            First token to decode.
        levels : float32 array (2 ** bits,)
            The codebook.
        back : float32 array (num_heads, head_dim, head_dim)
            The rotations' transposes.
        out : float32 array (num_heads, num_tokens, head_dim)
            Takes the rows.
        """
        raise NotImplementedError

    @staticmethod
    def encode_rows(
        rows: Array,
        rows_kind: str,
        rotation: Array,
        edges: Array,
        levels: Array,
        sketch: Array,
        codes: Array,
        scales: Array,
        signs: Array,
        residuals: Array,
        start: int,
        slots: Array | None = None,
    ) -> None:
        """Encode rows of several heads.

        Parameters
        ----------
        rows : array (num_tokens, num_heads, head_dim)
            Finite numbers, in the words of `rows_kind`.
        rows_kind : str
            Their kind.
        rotation : float32 array (num_heads, head_dim, head_dim)
            A row is turned by multiplying it with its head's matrix from the right.
        edges, levels : float32 array (2 ** bits - 1,), (2 ** bits,)
            The codebook, in rising order.
        sketch : float32 array (num_heads, head_dim, projections)
            Directions in the columns, for turned rows; ``projections`` may be 0.
        codes : uint8 array (num_heads, capacity, row_bytes)
            Takes the codes; see `numkv.rows.codes`.
        scales : float32 array (num_heads, capacity)
            Takes the scales.
        signs : uint8 array (num_heads, capacity, sign_bytes)
            Takes the signs of the sketch.
        residuals : float32 array (num_heads, capacity)
            Takes the norms of what the codes leave over; not looked at without a sketch.
        start : int
            Where the first token goes, and the others behind it.
        slots : int64 array (num_tokens,), optional
            Where each token goes instead.
        """
        raise NotImplementedError

    @staticmethod
    def score_codes(
        q: Array, q_kind: str, book: Codebook, stored: StoredCodes, options: CodesOptions, out: Array
    ) -> None:  # fmt: skip
        """Estimate the inner products of queries and encoded keys, on the codes.

        Parameters
        ----------
        q, q_kind, book, stored, options
            See `attend_codes`.
        out : float32 array (num_queries, num_q_heads, end - begin)
            Takes the scores; -inf where a query does not see a token.
        """
        raise NotImplementedError
