"""`PagedCompressor`: encoded keys and values of many sequences, in blocks of one pool that grows."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any, Unpack

import numpy as np

from numkv.access import drops, reads, whole, writes
from numkv.attention.options import AttentionOptions
from numkv.compression.blocks import (
    BLOCK_SIZE,
    NO_BLOCKS,
    Numbers,
    Sequence,
    StoredBlocks,
    counts_of,
    with_room,
)
from numkv.compression.compressor import Codes, check_heads
from numkv.compression.config import CompressorConfig
from numkv.compression.encoded import Encoded
from numkv.compression.heads import Heads, Side, Stored
from numkv.compression.saved import SavedBlocks, SavedSequence
from numkv.drawing.page import drawn
from numkv.errors import DimensionMismatch, NumkvError
from numkv.kernels.operations import Sequences, StoredCodes
from numkv.numbers import check_flag, check_index
from numkv.targets.base import Array
from numkv.targets.streamed import streamed


@drawn
class PagedCompressor(Heads):
    """The compressed keys and values of several heads of many sequences.

    The results of a sequence are those of a `MultiHeadCompressor` of the same config with its tokens, bit for bit,
    whatever other sequences there are.

    Parameters
    ----------
    num_heads, config, num_q_heads, target
        See `MultiHeadCompressor`.

    Raises
    ------
    DimensionMismatch
        See `MultiHeadCompressor`.

    Notes
    -----
    Threads: one at a time may write, a second one gets `NumkvError` and changes nothing. Several may read at the same
    time, also during `extend`, `add` and `fork`: they see the earlier tokens. During `remove`, `truncate` and `clear`
    of any sequence, a reader gets `NumkvError`.

    Examples
    --------
    >>> import numpy as np, numkv
    >>> heads = numkv.PagedCompressor(2, numkv.CompressorConfig(head_dim=64))
    >>> a, b = heads.add(), heads.add()
    >>> rows = np.random.default_rng(0).standard_normal((2, 8, 2, 64), dtype=np.float32)
    >>> heads.extend([a, b], rows[0], rows[1], [5, 3])
    >>> heads.length(a), heads.length(b), heads.attend([a, b], rows[0, :2]).shape
    (5, 3, (2, 2, 64))
    """

    _stored: StoredBlocks
    __saved__ = SavedBlocks

    def __init__(
        self, num_heads: int, config: CompressorConfig, *, num_q_heads: int | None = None, target: str = "cpu"
    ) -> None:  # fmt: skip
        num_heads, queries = check_heads(num_heads, num_q_heads)
        super().__init__(config, num_heads, queries, target)
        self._stored = StoredBlocks(*self._allocate(0), {}, 0, False)

    # -- what it is

    def __drawn__(self) -> StoredBlocks:
        """What is stored, for a drawing."""
        return self._stored

    @property
    def num_heads(self) -> int:
        """Kv heads."""
        return self.num_kv_heads

    @property
    def num_q_heads(self) -> int:
        """Q heads."""
        return self._num_q_heads

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return BLOCK_SIZE

    @property
    def num_blocks(self) -> int:
        """Number of blocks in the buffers now."""
        return self.capacity // BLOCK_SIZE

    @property
    def sequences(self) -> tuple[int, ...]:
        """The sequences, in the order in which they were added."""
        return tuple(self._stored.sequences)

    def __len__(self) -> int:
        """Return how many sequences there are."""
        return len(self._stored.sequences)

    def length(self, seq: int) -> int:
        """Return the number of tokens of a sequence.

        Parameters
        ----------
        seq : int
            The sequence.

        Returns
        -------
        int

        Raises
        ------
        IndexError, TypeError
            If there is no such sequence, or it is no integer.
        """
        return self._find(seq)[1].length

    def __repr__(self) -> str:
        return self._describe(f"num_heads={self.num_heads}, num_q_heads={self._num_q_heads}, ")

    # -- sequences

    @whole
    def add(self) -> int:
        """Add a sequence without tokens.

        Returns
        -------
        int
            Its number, which no other sequence has had.
        """
        return self._insert(Sequence(NO_BLOCKS, 0), self._stored.shared)

    @whole
    def fork(self, seq: int) -> int:
        """Make a second sequence with the same tokens; blocks are shared until one of the two writes to them.

        Parameters
        ----------
        seq : int
            Whose tokens they are.

        Returns
        -------
        int
            The second sequence; see `add`.

        Raises
        ------
        IndexError, TypeError
            See `length`.
        """
        return self._insert(self._find(seq)[1], True)

    @drops
    def remove(self, seq: int) -> None:
        """Remove a sequence; memory stays, for others.

        Parameters
        ----------
        seq : int
            The sequence.

        Raises
        ------
        IndexError, TypeError
            See `length`.
        """
        number, _ = self._find(seq)
        left = {n: x for n, x in self._stored.sequences.items() if n != number}
        self._stored = self._stored._replace(sequences=left)

    @drops
    def truncate(self, seq: int, length: int) -> None:
        """Keep the first tokens of a sequence only.

        Parameters
        ----------
        seq : int
            The sequence.
        length : int
            How many tokens to keep.

        Raises
        ------
        IndexError
            If there is no such sequence, or `length` is negative or above its own; nothing is dropped.
        TypeError
            If one of them is no integer.
        """
        number, found = self._find(seq)
        kept = check_index("length", length, found.length, inclusive=True)
        shorter = {number: Sequence(found.blocks[: -(-kept // BLOCK_SIZE)], kept)}
        self._stored = self._stored._replace(sequences=self._stored.sequences | shorter)

    @drops
    def clear(self) -> None:
        """Remove all sequences; memory and quantiser stay."""
        self._stored = self._stored._replace(sequences={}, shared=False)

    # -- tokens

    @streamed
    @writes
    def extend(
        self, sequences: Iterable[int], keys: Any, values: Any, new_lens: Any = 1, *,
        check_finite: bool = True,
    ) -> None:  # fmt: skip
        """Encode and append tokens of some sequences, all or none.

        Parameters
        ----------
        sequences : iterable of int
            The sequences, each once.
        keys, values : array (num_tokens, num_heads, head_dim)
            Vectors of any float dtype, those of one sequence after those of another.
        new_lens : int or array-like of int (num_seqs,)
            How many of them each sequence gets.
        check_finite : bool
            Whether the vectors are checked for NaN and infinity first; on CUDA that waits for the device.

        Raises
        ------
        DimensionMismatch
            If there are other numbers of tokens or heads, or (checked after NaN) vectors have another length.
        NonFiniteInput
            If a vector holds NaN or infinity; `index` is the position in its head's vector. Keys are checked first.
        IndexError
            If there is no such sequence, or a number is negative.
        ValueError
            If a sequence is there twice.
        UnsupportedDType, NotSupported, TypeError
            If an argument has another dtype, layout, target or type.
        """
        seqs = self._numbers(sequences, self._stored)
        lens = counts_of("new_lens", new_lens, len(seqs))
        shape = (sum(lens), self.num_heads, "head_dim")
        keys, values = self._vectors("keys", keys, shape), self._vectors("values", values, shape)
        self._check_vectors(("keys", "values"), keys, values, check_finite)
        if not sum(lens):
            return
        stored, made, moves = with_room(self._stored, seqs, lens, self._grown)
        for source, to in moves:
            self._copy_tokens(stored, source, stored, to)
        each = zip((made[seq] for seq in seqs), lens, strict=True)
        slots = [longer.slots(longer.length - n) for longer, n in each]
        places = self._target.index(np.concatenate(slots), np.int64)
        self._encode(keys, values, stored.keys, stored.values, 0, places)
        self._stored = stored._replace(sequences=stored.sequences | made)

    @streamed
    @reads
    def attend(
        self, sequences: Iterable[int], queries: Any, query_lens: Any = 1, *,
        return_lse: bool | None = False, check_finite: bool = True, **options: Unpack[AttentionOptions],
    ) -> Any:  # fmt: skip
        """Return the values of each q head's kv head, weighted by softmax: of many sequences in one call.

        Parameters
        ----------
        sequences : iterable of int
            The sequences, each once.
        queries : array (num_queries, num_q_heads, head_dim)
            A query for each q head, of any float dtype; those of one sequence after those of another. Several are those
            of its newest tokens, and see no later ones.
        query_lens : int or array-like of int (num_seqs,)
            How many of them each sequence has.
        return_lse, check_finite
            See `HeadCompressor.attend`.
        **options
            `sm_scale`, `logits_soft_cap` and `window_left`: see `numkv.AttentionOptions`.

        Returns
        -------
        out : float32 array (num_queries, num_q_heads, head_dim)
            Zeros where a sequence has no tokens. It does not depend on what else a call has.
        lse : float32 array (num_queries, num_q_heads)
            Natural log, -inf where a sequence has no tokens; only with `return_lse`.

        Raises
        ------
        DimensionMismatch
            If there are other numbers of queries or q heads, queries have another length, or a sequence has more than
            tokens (and more than one).
        NonFiniteInput, IndexError, UnsupportedDType, NotSupported, ValueError, TypeError
            See `extend`.
        """
        asked = self._options(options)
        return_lse = check_flag("return_lse", return_lse)
        stored = self._stored
        seqs = self._numbers(sequences, stored)
        lens = counts_of("query_lens", query_lens, len(seqs))
        queries = self._vectors("queries", queries, (sum(lens), self._num_q_heads, "head_dim"))
        q, q_kind = self._query("queries", queries, check_finite)
        self._check_length("queries", queries)
        found = [stored.sequences[seq] for seq in seqs]
        for seq, (_, length), n in zip(seqs, found, lens, strict=True):
            if n > max(length, 1):
                raise DimensionMismatch(
                    f"`query_lens`: expected queries of the newest tokens, of which sequence {seq} has {length}, got "
                    f"{n}; append the tokens first",
                    expected=length,
                    actual=n,
                )
        codes = None
        if any(length for _, length in found):
            tables = [blocks for blocks, _ in found]
            sizes = [len(blocks) for blocks in tables]
            batch = Sequences(
                np.array([length for _, length in found]), np.array(lens), np.concatenate(tables),
                np.array([0, *itertools.accumulate(sizes[:-1])]), BLOCK_SIZE,
            )  # fmt: skip
            values = stored.values
            codes = StoredCodes(*stored.keys, values.codes, values.scales, 0, 0, batch)
        out, lse = self._attended(q, q_kind, codes, asked, return_lse)
        return (out, lse) if return_lse else out

    @streamed
    @reads
    def attention_scores(
        self, seq: int, queries: Any, *, check_finite: bool = True, **options: Unpack[AttentionOptions]
    ) -> Array:  # fmt: skip
        """Estimates of ``key . query`` for all q heads and tokens of a sequence, scaled, without softmax.

        The sequence's codes are copied for it.

        Parameters
        ----------
        seq : int
            The sequence.
        queries : array (num_q_heads, head_dim) or (num_queries, num_q_heads, head_dim)
            See `MultiHeadCompressor.attention_scores`.
        check_finite
            See `HeadCompressor.attention_scores`.
        **options
            `sm_scale`, `logits_soft_cap` and `window_left`: see `numkv.AttentionOptions`.

        Returns
        -------
        float32 array (num_q_heads, length) or (num_queries, num_q_heads, length)
            See `HeadCompressor.attention_scores`.

        Raises
        ------
        DimensionMismatch, NonFiniteInput, IndexError, UnsupportedDType, NotSupported, ValueError, TypeError
            See `extend` and `attend`.
        """
        return self._scores("queries", queries, options, check_finite, self._gathered(seq))

    @streamed
    @reads
    def decode_keys(self, seq: int) -> Array:
        """Return the keys of a sequence, decoded from their codes; the sketch is not used.

        Parameters
        ----------
        seq : int
            The sequence.

        Returns
        -------
        float32 array (num_heads, length, head_dim)

        Raises
        ------
        IndexError, TypeError
            See `length`.
        """
        return self._decode_rows("keys", self._gathered(seq))

    @streamed
    @reads
    def decode_values(self, seq: int) -> Array:
        """Return the values of a sequence, decoded from their codes.

        Parameters
        ----------
        seq : int
            The sequence.

        Returns
        -------
        float32 array (num_heads, length, head_dim)

        Raises
        ------
        IndexError, TypeError
            See `length`.
        """
        return self._decode_rows("values", self._gathered(seq))

    @streamed
    @reads
    def key_codes(self, seq: int) -> Codes:
        """The stored form of a sequence's keys, by head: codes, scales and the sketch.

        Parameters
        ----------
        seq : int
            The sequence.

        Returns
        -------
        Codes
            Copies.

        Raises
        ------
        IndexError, TypeError
            See `length`.
        """
        return self._codes(seq, "keys")

    @streamed
    @reads
    def value_codes(self, seq: int) -> Codes:
        """The stored form of a sequence's values, by head.

        Parameters
        ----------
        seq : int
            The sequence.

        Returns
        -------
        Codes
            Copies.

        Raises
        ------
        IndexError, TypeError
            See `length`.
        """
        return self._codes(seq, "values")

    # -- its proof

    @streamed
    @reads
    def check(self) -> None:
        """Verify tables, lengths, buffer shapes and that scales are finite.

        They are not where vectors with NaN were appended with ``check_finite=False``. On CUDA it waits for the device.

        Raises
        ------
        NumkvError
            If it is inconsistent; the message names the contradiction.
        """
        stored = self._stored
        most = stored.capacity // BLOCK_SIZE
        places: dict[int, int] = {}
        for seq, (blocks, length) in stored.sequences.items():
            own = blocks.tolist()
            if not 0 <= seq < stored.following or len(own) != -(-length // BLOCK_SIZE):
                raise NumkvError(
                    f"check: sequence {seq} has {len(own)} blocks for {length} tokens, and {stored.following} have "
                    "been added"
                )
            if len(set(own)) != len(own) or not all(0 <= block < most for block in own):
                raise NumkvError(f"check: sequence {seq} has blocks {own} of {most}")
            for place, block in enumerate(own):
                if block in places and (places[block] != place or not stored.shared):
                    raise NumkvError(f"check: block {block} belongs to two sequences")
                places[block] = place
        slots = [found.slots() for found in stored.sequences.values()]
        used = np.unique(np.concatenate(slots)) if slots else NO_BLOCKS
        self._check_buffers(stored.keys, stored.values, used)

    # -- how

    def _find(
        self, seq: Any, stored: StoredBlocks | None = None, name: str = "seq"
    ) -> tuple[int, Sequence]:
        """A sequence and its number; `name` is the argument's."""
        number = seq if type(seq) is int else check_index(name, seq, 2**63)
        found = (stored or self._stored).sequences.get(number)
        if found is None:
            shown = number if abs(number) < 2**63 else "a number beyond int64"
            raise IndexError(
                f"`{name}`: expected one of the sequences that were added, got {shown}"
            )
        return number, found

    def _numbers(self, sequences: Any, stored: StoredBlocks) -> list[int]:
        """Numbers of sequences, each once; an iterable may have no end."""
        try:
            given = list(itertools.islice(iter(sequences), len(stored.sequences) + 1))
        except TypeError:
            raise TypeError(
                f"`sequences`: expected numbers of sequences, got {type(sequences).__name__}; pass a list"
            ) from None
        numbers = [self._find(seq, stored, "sequences")[0] for seq in given]
        if len(set(numbers)) != len(numbers):
            raise ValueError(f"`sequences`: expected each sequence once, got {numbers[:8]}")
        return numbers

    def _insert(self, made: Sequence, shared: bool) -> int:
        stored = self._stored
        number = stored.following
        self._stored = stored._replace(
            sequences=stored.sequences | {number: made}, following=number + 1, shared=shared
        )
        return number

    def _grown(self, stored: StoredBlocks, missing: int) -> StoredBlocks:
        """With room for so many more blocks, and at least for twice as many tokens."""
        capacity = stored.capacity
        return self._in_buffers(stored, max(capacity + missing * BLOCK_SIZE, 2 * capacity))

    def _in_buffers(self, stored: StoredBlocks, capacity: int) -> StoredBlocks:
        """The same in new buffers."""
        keys, values = self._allocate(capacity)
        if stored.capacity:
            stored.keys.move(self._target, keys, 0)
            stored.values.move(self._target, values, 0)
        return stored._replace(keys=keys, values=values)

    def _copied_rows(self) -> StoredBlocks:
        return self._in_buffers(self._stored, self._stored.capacity)

    def _slots(self, stored: StoredBlocks) -> tuple[Numbers, dict[str, Any]]:
        """Those of whole blocks, each once, and -1 for those of no sequence."""
        sequences = stored.sequences.items()
        used = np.unique(np.concatenate([NO_BLOCKS, *(x.blocks for _, x in sequences)]))
        slots = (used[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).reshape(-1)
        own = np.concatenate([NO_BLOCKS, *(x.slots() for _, x in sequences)])
        saved = [
            SavedSequence(
                number=n, length=x.length, blocks=np.searchsorted(used, x.blocks).tolist()
            )
            for n, x in sequences
        ]
        more = {"num_blocks": len(used), "following": stored.following, "sequences": saved}
        return np.where(np.isin(slots, own), slots, -1), more

    def _resumed(self, saved: SavedBlocks, keys: Encoded, values: Encoded) -> StoredBlocks:
        return StoredBlocks(keys, values, saved.by_number(), saved.following, True)

    def _copy_tokens(self, source: Any, slots: Numbers, to: Any, to_slots: Numbers) -> None:
        """Copy what is stored of tokens, of all heads."""
        places = [self._target.index(x, np.int64) for x in (slots, to_slots)]
        for one, other in ((source.keys, to.keys), (source.values, to.values)):
            for x, y in zip(one, other, strict=True):
                if x.size and y.size:
                    x, y = (a.reshape((1, *a.shape)) for a in (x, y))
                    self._target.ops.copy_tokens(x, places[0], y, places[1])

    def _gathered(self, seq: Any) -> Stored:
        """Copies of what is stored of a sequence, one token after the other."""
        found, stored = self._find(seq)[1], self._stored  # blocks keep their numbers when it grows
        rows = Stored(*self._allocate(found.length), 0, found.length)
        if found.length:
            self._copy_tokens(stored, found.slots(), rows, np.arange(found.length))
        return rows

    def _codes(self, seq: Any, which: Side) -> Codes:
        encoded: Encoded = getattr(self._gathered(seq), which)
        return Codes(*encoded)
