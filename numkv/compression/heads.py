"""`Heads`: what all compressors have in common: a config, buffers of encoded keys and values, and checks.

The rotations and the codebook (`numkv.compression.quantiser`) are made once for all compressors of the same config.
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal, NamedTuple, Self

import numpy as np

from numkv import targets
from numkv.access import Access, reads
from numkv.arrays import owned
from numkv.attention.options import IN_A_WINDOW, AttentionOptions, check_options
from numkv.checks import Shape, check_array
from numkv.compression.config import CodesKind, CompressorConfig
from numkv.compression.encoded import Encoded, Numbers
from numkv.compression.quantiser import quantiser_of
from numkv.compression.saved import SavedCodes
from numkv.errors import DimensionMismatch, NonFiniteInput, NumkvError
from numkv.kernels.operations import CodesOptions, StoredCodes
from numkv.kinds import QUERY_DTYPES
from numkv.numbers import check_bytes, check_flag
from numkv.snapshots.fields import expect
from numkv.snapshots.snapshot import Options, Snapshot, Source, Tensor, fill_all
from numkv.storage.buffer import source_kind
from numkv.targets.base import Array, Target
from numkv.targets.streamed import streamed

Side = Literal["keys", "values"]


class Stored(NamedTuple):
    """Encoded tokens: those in ``[begin, end)`` of the buffers.

    A compressor has one at a time and never changes it, so that a reader beside a writer has buffers and numbers that
    belong together. Rows past `end` may be written meanwhile.
    """

    keys: Encoded
    values: Encoded
    begin: int
    end: int

    @property
    def tokens(self) -> int:
        """How many."""
        return self.end - self.begin

    @property
    def capacity(self) -> int:
        """Tokens that the buffers hold."""
        return int(self.keys.scales.shape[1])


class Heads:
    """A config, encoded keys and values by head in ``_stored``, and what is checked of vectors and options."""

    #: Has `keys`, `values` and `capacity`; replaced as a whole.
    _stored: Any
    #: What its snapshots hold beside tensors.
    __saved__: ClassVar[type[SavedCodes]] = SavedCodes

    def __len__(self) -> int:
        raise NotImplementedError

    def __init__(
        self, config: CompressorConfig, num_heads: int, num_q_heads: int, target: str
    ) -> None:
        if not isinstance(config, CompressorConfig):
            raise TypeError(f"`config`: expected a CompressorConfig, got {type(config).__name__}")
        wide = config.head_dim + max(config.head_dim, config.projections or 0)
        check_bytes({"num_heads": num_heads, "head_dim": config.head_dim, "projections": wide}, 8)
        self._config = config
        self._plain_options = CodesOptions(1 / math.sqrt(config.head_dim))
        self._num_q_heads = num_q_heads
        self._q_axes: tuple[int, ...] = (num_q_heads,)  # those of a query before its elements
        self._target = targets.get(target)
        self._quantiser = quantiser_of(config, num_heads, self._target)
        self._access = Access()

    def __runs_on__(self) -> tuple[Target, Any]:
        return self._target, self._quantiser.levels

    def _allocate(self, capacity: int) -> tuple[Encoded, Encoded]:
        heads, config = int(self._quantiser.rotation.shape[0]), self._config
        keys, values = (
            Encoded.allocate(self._target, heads, capacity, config.head_dim, kind)
            for kind in (config.kind, config.v_kind)
        )
        return keys, values

    # -- what it is

    @property
    def config(self) -> CompressorConfig:
        """How vectors are compressed."""
        return self._config

    @property
    def target(self) -> str:
        """Name of the target."""
        return self._target.name

    @property
    def kind(self) -> CodesKind:
        """How keys are stored: ``codes`` and their bits, with a sketch if there is one."""
        return self._config.kind

    @property
    def v_kind(self) -> CodesKind:
        """How values are stored."""
        return self._config.v_kind

    @property
    def num_kv_heads(self) -> int:
        """Kv heads."""
        return int(self._quantiser.rotation.shape[0])

    @property
    def head_dim(self) -> int:
        """Elements of a key."""
        return self._config.head_dim

    @property
    def head_dim_v(self) -> int:
        """Elements of a value: as many."""
        return self._config.head_dim

    @property
    def capacity(self) -> int:
        """Number of tokens for which the buffers have room now."""
        return int(self._stored.capacity)

    @property
    def bytes_per_token(self) -> int:
        """Bytes of one token's keys and values, scales and sketch included."""
        dim = self._config.head_dim
        return self.num_kv_heads * (self.kind.row_bytes(dim) + self.v_kind.row_bytes(dim))

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers, room for further tokens included."""
        stored = self._stored
        return sum(int(x.nbytes) for x in (*stored.keys, *stored.values))

    @property
    def quantiser_nbytes(self) -> int:
        """Bytes of the rotations, sketch and codebook, which compressors of equal config and heads share."""
        return self._quantiser.nbytes

    def _describe(self, heads: str) -> str:
        config = self._config
        v_bits = "" if config.v_bits is None else f", v_bits={config.v_bits}"
        sketch = "" if config.projections is None else f", projections={config.projections}"
        v_kind = "" if config.v_bits is None else f", v_kind={self.v_kind}"
        return (
            f"{type(self).__name__}(len={len(self)}, {heads}head_dim={config.head_dim}, "
            f"bits={config.bits}{v_bits}{sketch}, seed={config.seed}, kind={self.kind}{v_kind}, target={self.target}, "
            f"bytes_per_token={self.bytes_per_token}, nbytes={self.nbytes})"
        )

    @streamed
    @reads
    def copy(self) -> Self:
        """A deep copy; only the quantiser, which is immutable, is shared.

        ``copy.copy`` and ``copy.deepcopy`` make the same; on the CPU compressors can be pickled too.

        Returns
        -------
        HeadCompressor, MultiHeadCompressor or PagedCompressor
            Of the same class.
        """
        return self._copied()

    def _copied(self) -> Self:
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        new._access = Access()
        new._stored = self._copied_rows()
        return new

    def _copied_rows(self) -> Any:
        """What is stored, in buffers of its own."""
        raise NotImplementedError

    __copy__ = copy

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self.copy()

    @reads
    def __getstate__(self) -> dict[str, Any]:
        if not self._target.values_on_host:
            raise NumkvError(
                f"{type(self).__name__}: expected a compressor on the CPU to pickle, got one on "
                f"{self.target}, whose memory belongs to this process; copy it with copy()"
            )
        # The quantiser follows from the config.
        return {n: x for n, x in self._copied().__dict__.items() if n != "_quantiser"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(owned(state))
        heads = int(self._stored.keys.scales.shape[0])
        self._quantiser = quantiser_of(self._config, heads, self._target)

    # -- saved and loaded

    def _slots(self, stored: Any) -> tuple[Numbers, dict[str, Any]]:
        """Which vectors of the buffers are saved, -1 for zeros, and what a snapshot holds beside their number."""
        raise NotImplementedError

    def _resumed(self, saved: Any, keys: Encoded, values: Encoded) -> Any:
        """What is stored of a compressor that was saved, in buffers of as many vectors."""
        raise NotImplementedError

    def __snapshot__(self) -> Snapshot:
        """See `numkv.snapshots.snapshot`."""
        stored, config = self._stored, self._config
        slots, more = self._slots(stored)
        saved = self.__saved__(
            num_heads=self.num_kv_heads, num_q_heads=self._num_q_heads, head_dim=config.head_dim, bits=config.bits,
            projections=config.projections, seed=str(config.seed), tokens=len(slots),
            quantiser=self._quantiser.fingerprint(self._target), v_bits=config.v_bits, **more,
        )  # fmt: skip
        return Snapshot(saved, self._tensors(saved, stored, slots), [(self, False)])

    def _tensors(self, saved: SavedCodes, stored: Any, slots: Numbers) -> list[Tensor]:
        of_keys = stored.keys.tensors(self._target, saved.specs_of("k"), slots)
        of_values = stored.values.tensors(self._target, saved.specs_of("v"), slots)
        return [*of_keys, *of_values]

    @classmethod
    def __restore__(cls, saved: SavedCodes, source: Source, options: Options) -> Self:
        """See `numkv.snapshots.snapshot`."""
        make: Any = cls
        made: Self = make(**saved.arguments(), target=options.place.name)
        found = made._quantiser.fingerprint(made._target)
        expect(
            found == saved.quantiser,
            f"codes of another codebook or rotation, {saved.quantiser}, than {found}",
        )
        stored = made._resumed(saved, *made._allocate(saved.tokens))
        fill_all(source, made._tensors(saved, stored, np.arange(saved.tokens)))
        made._stored = stored
        return made

    def _check_buffers(self, keys: Encoded, values: Encoded, used: Any) -> None:
        """Look for buffers of other shapes, and for scales of the tokens `used` that are not finite."""
        capacity = int(self._stored.capacity)
        for name, encoded, kind in (("keys", keys, self.kind), ("values", values, self.v_kind)):
            wanted = Encoded.shapes(self.num_kv_heads, capacity, self.head_dim, kind)
            for array, shape in zip(encoded, wanted, strict=True):
                if tuple(array.shape) != shape:
                    raise NumkvError(
                        f"check: buffers of {name} have shape {tuple(array.shape)}, expected {shape}"
                    )
            for floats in (encoded.scales, encoded.residuals):
                if floats.size and not np.isfinite(self._target.to_host(floats)[:, used]).all():
                    raise NumkvError(
                        f"check: scales of {name} are not finite; vectors with NaN or infinity were pushed "
                        "unchecked"
                    )

    # -- checks, in the order of the contract: number of vectors, finite elements, number of elements

    def _vectors(self, name: str, x: Any, shape: Shape) -> Array:
        """Check dtype, rank and number of vectors."""
        x = check_array(self._target, name, x, QUERY_DTYPES, tuple(str(n) for n in shape))
        for expected, actual in zip(shape[:-1], tuple(x.shape)[:-1], strict=True):
            if isinstance(expected, int) and expected != actual:
                raise DimensionMismatch(
                    f"`{name}`: expected {x.dtype} ({', '.join(map(str, shape))}), got "
                    f"{tuple(x.shape)}; pass a vector for each head",
                    expected=expected,
                    actual=int(actual),
                )
        return x

    def _check_finite(self, name: str, x: Array) -> None:
        """Refuse NaN and infinity in vectors ``(num_tokens, num_heads, …)``."""
        flat = self._target.ops.first_non_finite(self._target.words(x), source_kind(x))
        if flat >= 0:
            token, head, i = (int(n) for n in np.unravel_index(flat, tuple(x.shape)))
            raise NonFiniteInput(
                f"`{name}`: expected finite numbers, got NaN or infinity at index {i} of the vector of "
                f"token {token}, head {head}; mask it, or pass check_finite=False",
                index=i,
            )

    def _check_length(self, name: str, x: Array) -> None:
        expected, actual = self._config.head_dim, int(tuple(x.shape)[-1])
        if actual != expected:
            raise DimensionMismatch(
                f"`{name}`: expected vectors of head_dim={expected} elements, got {actual}; pass "
                "vectors of the config's length",
                expected=expected,
                actual=actual,
            )

    def _check_vectors(
        self, names: tuple[str, str], keys: Array, values: Array, check_finite: bool
    ) -> None:
        """Check the numbers of keys and values ``(num_tokens, num_heads, …)``."""
        if check_flag("check_finite", check_finite, True):
            self._check_finite(names[0], keys)
            self._check_finite(names[1], values)
        self._check_length(names[0], keys)
        self._check_length(names[1], values)

    def _options(self, given: AttentionOptions) -> CodesOptions:
        """What is asked of scores, checked; most calls ask for nothing, and small ones notice checks."""
        if not given:
            return self._plain_options
        checked = check_options(given, takes=IN_A_WINDOW)
        scale = self._plain_options.sm_scale if checked.sm_scale is None else checked.sm_scale
        return CodesOptions(scale, checked.logits_soft_cap, checked.window_left)

    def _query(self, name: str, x: Array, check_finite: bool) -> tuple[Array, str]:
        if check_flag("check_finite", check_finite, True):
            self._check_finite(name, x)
        return self._target.words(x), source_kind(x)

    # -- writing

    def _encode(
        self, keys: Array, values: Array, to_keys: Encoded, to_values: Encoded, start: int,
        slots: Array | None = None,
    ) -> None:  # fmt: skip
        """Encode vectors ``(num_tokens, num_heads, head_dim)`` into buffers, from `start` on or to `slots`."""
        quantiser = self._quantiser
        for x, levels, edges, sketch, to in (
            (keys, quantiser.levels, quantiser.edges, quantiser.sketch, to_keys),
            (values, quantiser.v_levels, quantiser.v_edges, quantiser.no_sketch, to_values),
        ):
            self._target.ops.encode_rows(
                self._target.words(x), source_kind(x), quantiser.rotation, edges, levels, sketch,
                *to, start, slots,
            )  # fmt: skip

    # -- reading; what is stored is an argument, as a copy of a part of it may be

    def _decode_rows(self, which: Side, stored: Stored) -> Array:
        """``"keys"`` or ``"values"`` ``(num_heads, tokens, head_dim)``."""
        encoded: Encoded = getattr(stored, which)
        heads, dim = (int(n) for n in self._quantiser.rotation.shape[:2])
        out = self._target.empty((heads, stored.tokens, dim), np.float32)
        quantiser = self._quantiser
        levels = quantiser.levels if which == "keys" else quantiser.v_levels
        if stored.tokens:
            self._target.ops.decode_rows(
                encoded.codes, encoded.scales, stored.begin, levels, quantiser.back, out
            )
        return out

    def _by_query(self, name: str, x: Any) -> tuple[Array, tuple[int, ...]]:
        """A caller's queries as ``(num_queries, num_q_heads, …)``, and the axes that they came with."""
        axes = self._q_axes
        several = len(getattr(x, "shape", ())) > len(axes) + 1
        shape: Shape = (*axes, "head_dim")
        x = self._vectors(name, x, ("num_queries", *shape) if several else shape)
        if several:
            axes = int(x.shape[0]), *axes
        if not self._q_axes:  # of one head
            x = self._target.one_head(x) if several else x.reshape((1, 1, int(x.shape[0])))
        elif not several:
            x = self._target.token_major(self._target.one_head(x))
        return x, axes

    def _read(self, name: str, queries: Array, stored: Stored) -> StoredCodes:
        """What these queries read."""
        count = int(queries.shape[0])
        if count > max(stored.tokens, 1):
            raise DimensionMismatch(
                f"`{name}`: expected queries of the newest tokens, of which there are {stored.tokens}, got {count}; "
                "append the tokens first",
                expected=stored.tokens,
                actual=count,
            )
        values = stored.values
        codes = (*stored.keys, values.codes, values.scales)
        return StoredCodes(*codes, stored.begin, stored.end)

    def _scores(
        self, name: str, queries: Any, options: AttentionOptions, check_finite: bool, stored: Stored
    ) -> Array:
        """Scores of a caller's queries, with their axes and then one of tokens."""
        asked = self._options(options)
        queries, axes = self._by_query(name, queries)
        q, q_kind = self._query(name, queries, check_finite)
        count, tokens = int(q.shape[0]), stored.tokens
        if tokens or count != 1:  # without tokens a query may have any length
            self._check_length(name, queries)
        out = self._target.empty((count, self._num_q_heads, tokens), np.float32)
        codes = self._read(name, queries, stored)
        if tokens and count:
            self._target.ops.score_codes(q, q_kind, self._quantiser.book, codes, asked, out)
        return out.reshape((*axes, tokens))

    def _attended(
        self, q: Array, q_kind: str, stored: StoredCodes | None, options: CodesOptions, return_lse: bool
    ) -> tuple[Array, Array]:  # fmt: skip
        """Outputs of queries ``(num_queries, num_q_heads, head_dim)``, and lse, which is empty where nobody asks."""
        shape = (int(q.shape[0]), self._num_q_heads)
        of_lse = shape if return_lse else (0, 0)
        if stored is None:
            nothing = self._target.asarray(np.full(of_lse, -np.inf, np.float32))
            return self._target.zeros((*shape, self._config.head_dim), np.float32), nothing
        out = self._target.empty((*shape, self._config.head_dim), np.float32)
        lse = self._target.empty(of_lse, np.float32)
        if shape[0]:
            self._target.ops.attend_codes(
                q, q_kind, self._quantiser.book, stored, options, out, lse
            )
        return out, lse
