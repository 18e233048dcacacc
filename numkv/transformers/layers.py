"""Cache layers whose rows are numkv's, how they store these, and what travels from them to the attention function."""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch._C import DisableTorchFunctionSubclass
from torch.compiler import is_dynamo_compiling
from torch.nn import functional

from numkv import targets
from numkv.access import Access
from numkv.caches import FullPrecision, Profile
from numkv.caches.layer_spec import in_full, refuse_longer_than_group
from numkv.errors import CacheFull, DimensionMismatch, NotSupported, UnsupportedDType
from numkv.interrupts import uninterrupted
from numkv.kinds import Kind, kind_of_dtype, kinds_of, refuse_channels
from numkv.kinds import kind as kind_of
from numkv.numbers import check_flag, check_nbytes, check_size
from numkv.storage.buffer import refuse_rotated_channels
from numkv.storage.latents import LatentPool
from numkv.storage.pool import Pool
from numkv.torch.tensors import array_of
from numkv.transformers.families import layers_with_rows
from numkv.transformers.full_precision import FullPrecisionRing, NewestTokenGroups
from numkv.transformers.internals import CacheLayerMixin, LinearAttentionLayer
from numkv.transformers.metadata import BatchMetadata, Move, Step

# Short blocks are copied fast where beams part, and long ones read as fast as memory without blocks.
_BLOCK_SIZE = 256
_SMALLEST = 16
_GROUP = kind_of("int8_channel").group_tokens
_Tensor = torch.Tensor
#: Metadata, a pool, and what else is in full.
Held = tuple[BatchMetadata, Any, Any]
# What may be asked of rows on their way; everything else would compute with them.
_ASKED = {
    _Tensor.shape.__get__, _Tensor.dtype.__get__, _Tensor.device.__get__, _Tensor.ndim.__get__,
    _Tensor.layout.__get__, _Tensor.requires_grad.__get__, _Tensor.size, _Tensor.dim, _Tensor.__len__,
    _Tensor.is_floating_point, _Tensor.numel, _Tensor.is_contiguous, _Tensor.stride,
}  # fmt: skip
# What `expand_kv` of transformers' models does with latents; any other code computes with them.
_EXPANDING = {
    _Tensor.view, _Tensor.transpose, torch.split, _Tensor.split, _Tensor.expand, _Tensor.__getitem__,
    functional.linear, _Tensor.copy_, _Tensor.new_empty,
}  # fmt: skip


class Shared:
    """What all layers of a cache have in common, whatever they are stored in.

    Parameters
    ----------
    max_nbytes : int, optional
        Bytes that their buffers may take together.
    """

    def __init__(self, max_nbytes: int | None = None) -> None:
        self.access, self.max_nbytes = Access(), max_nbytes
        #: Those that are in use; none of them is kept by this.
        self.layers: weakref.WeakSet[NumkvLayer] = weakref.WeakSet()
        #: Of layers that attend by compiled calls: see `numkv.transformers.attention`.
        self.groups: dict[tuple[Any, ...], Any] = {}
        #: What asks about the keys of a first prompt: a `numkv.transformers.tolerance.Tolerance`, or None.
        self.tolerance: Any = None
        self._config: Any = None  # of the model that came last

    def __reduce__(self) -> Any:
        return Shared, (self.max_nbytes,)  # groups hold addresses, and layers come by themselves

    def check_model(self, config: Any) -> None:
        """Refuse a model with more layers of attention before the first of them is written."""
        if config is not self._config:
            check_depth(len(self.layers), layers_with_rows(config.get_text_config(decoder=True)))
            self._config = config

    def make_room(self, own: NumkvLayer, offset: int, mask: Any, columns: int) -> None:
        """Give layers room for a pass before the first of them is written; without tokens each in its turn.

        A layer that drops most of a long pass again gets the room for it in its turn, too.

        Parameters
        ----------
        own : NumkvLayer
            The layer whose turn it is.
        offset, columns : int
            Columns so far, and those of the pass.
        mask : bool array (batch, columns or more), or None
            Which of them are tokens.

        Raises
        ------
        CacheFull
            If all of it takes more than `max_nbytes`. Layers are as they were; without tokens they have no buffers.
        """
        held: dict[BatchMetadata, list[NumkvLayer]] = {}
        for layer in self.layers:
            if layer.metadata is not None and layer.metadata.columns == offset:
                held.setdefault(layer.metadata, []).append(layer)
        more = {at: at.more(mask, columns) for at in held}
        least = {at: at.used + n if n else 0 for at, n in more.items()}
        # The first pass has made what is in full, which `_blocks` counts.
        if (offset or self.max_nbytes is None) and all(n <= x.num_blocks for x, n in least.items()):
            return
        needed, beside = least[own.metadata], 0
        for at, layers in held.items():
            if at.reach >= 0 and not layers[0].record_past and least[at] > 2 * at.enough:
                beside = max(beside, (least[at] - at.enough) * layers[0].block_nbytes)
                least[at] = at.enough
        found = self._blocks(held, least, beside, offset, columns)
        for at in sorted(found, key=lambda x: found[x] - x.num_blocks):
            for layer in held[at]:
                layer.resize(found[at])
        own.resize(max(needed, own.metadata.num_blocks))

    def refuse_batch(self, batch: int) -> None:
        """Refuse more sequences whose tokens in full precision `max_nbytes` is too small for."""
        nbytes = sum(x.nbytes for x in self.layers)
        for ring, at in ((x.ring, x.metadata) for x in self.layers if x.ring is not None):
            nbytes += (batch - at.batch) * (ring.pool.nbytes // max(1, at.batch))
        if self.max_nbytes is not None and nbytes > self.max_nbytes:
            raise self._full(f"{batch} sequences", nbytes)

    def _full(self, what: str, nbytes: int) -> CacheFull:
        return CacheFull(
            f"NumkvCache: expected K and V of at most {self.max_nbytes} bytes, its `max_nbytes`, got {what}, with "
            f"which they take {nbytes}; nothing was stored: pass fewer, crop the cache, or make it with more"
        )

    def _blocks(
        self, held: dict[BatchMetadata, list[NumkvLayer]], least: dict[BatchMetadata, int], beside: int, offset: int,
        columns: int,
    ) -> dict[BatchMetadata, int]:  # fmt: skip
        """Blocks of the pools that change: twice as many if there are too few, as far as `max_nbytes` goes."""
        found = {}
        for at, layers in held.items():
            if least[at] > at.num_blocks:
                grown = max(2 * at.num_blocks, layers[0].reserved(at.batch))
                found[at] = max(least[at], grown if at.reach < 0 else min(grown, 2 * at.enough))
        if self.max_nbytes is None:
            return found
        found = found if offset else {at: least[at] for at in found}
        of_block = {at: sum(x.block_nbytes for x in layers) for at, layers in held.items()}
        rest = self.max_nbytes - beside - sum(x.nbytes for x in self.layers)
        if sum((n - at.num_blocks) * of_block[at] for at, n in found.items()) <= rest:
            return found
        # What others have too much of is given to those that have too little.
        least = {at: least[at] or at.used for at in held}
        rest += sum((at.num_blocks - n) * of_block[at] for at, n in least.items())
        if rest < 0:
            for layer in () if offset else self.layers:
                layer.drop()
            raise self._full(f"{columns} new tokens after {offset}", self.max_nbytes - rest)
        spare = {at: found.get(at, at.num_blocks) - n for at, n in least.items()}
        asked = sum(n * of_block[at] for at, n in spare.items())
        return {at: n + spare[at] * rest // asked for at, n in least.items()}


class Options:
    """How a layer of a `NumkvCache` stores rows, checked; without a profile one object for all of them.

    Parameters
    ----------
    kind, k_kind, v_kind : str, optional
        Storage kinds; see `numkv.transformers.NumkvCache`.
    capacity : int, optional
        Tokens of each sequence to reserve room for.
    rotate : bool
        Whether rows are rotated.
    full_precision : FullPrecision, optional
        Newest and first tokens of each sequence that are kept in full precision, too.
    max_nbytes : int or str, optional
        Bytes that the buffers of all layers may take.
    """

    #: Kv heads and elements of K and V that rows must have, if a profile says so.
    shape: tuple[Any, ...] | None = None

    def __init__(
        self,
        kind: Any = None,
        k_kind: Any = None,
        v_kind: Any = None,
        capacity: int | None = None,
        rotate: bool = False,
        full_precision: FullPrecision | None = None,
        max_nbytes: int | str | None = None,
    ) -> None:
        if kind is not None and k_kind is not None and v_kind is not None:
            raise ValueError(
                "`kind`: expected None where k_kind and v_kind are both given, got all three"
            )
        asked = (kind if x is None else x for x in (k_kind, v_kind))
        self.k_kind, self.v_kind = (None if x is None else kind_of(x) for x in asked)
        self.capacity = 0 if capacity is None else check_size("capacity", capacity)
        self.rotate = check_flag("rotate", rotate)
        if self.v_kind is not None:
            _, self.v_kind = kinds_of(self.v_kind, None, v_kind, by_channel=True)
        kinds = self.k_kind, self.v_kind
        quantises = any(of is not None and of.has_scales for of in kinds)
        self.full_precision = in_full(full_precision, "floats", quantises)
        if self.k_kind is not None and self.group_tokens:
            refuse_rotated_channels(self.k_kind, self.rotate)
            if self.full_precision is not None:
                refuse_longer_than_group(self.full_precision.window, self.k_kind)
        self.shared = Shared(None if max_nbytes is None else check_nbytes("max_nbytes", max_nbytes))

    @property
    def group_tokens(self) -> int:
        """Tokens of a token group where keys are stored by channel, else 0."""
        return 0 if self.k_kind is None else self.k_kind.group_tokens

    @property
    def num_sink_tokens(self) -> int:
        """First tokens that are kept in full."""
        return 0 if self.full_precision is None else self.full_precision.num_sink_tokens

    @property
    def in_full(self) -> tuple[int, int]:
        """Blocks of each sequence for tokens in full precision, and tokens of a block."""
        first, kept = self.num_sink_tokens, self.full_precision
        if self.group_tokens:
            return NewestTokenGroups.shape(first, self.group_tokens)
        return 1, first + (0 if kept is None else kept.window)

    def check_layer(self, number: int, layer: NumkvLayer) -> None:
        """Refuse keys by channel where no token would be read as a code, and for latents."""
        if self.k_kind is None or not self.group_tokens:
            return
        if layer.pool_class is not Pool:
            refuse_channels("`kind`", self.k_kind)
        if not layer.takes_channels:
            raise NotSupported(
                f"NumkvCache: expected windows of more than {self.group_tokens} tokens for keys in {self.k_kind}, "
                f"whose newest {self.group_tokens} are in full, got one of {layer.reach + 1} in layer {number}; take "
                f"{self.k_kind.of_rows}, or a profile in which this layer has another kind"
            )

    def of_layers(self, profile: Profile) -> Iterator[Options]:
        """Return the options of each layer of a profile, with what these have in common."""
        for layer in profile:
            made = Options(
                None, layer.kind, layer.v_kind, self.capacity, layer.rotate, layer.full_precision
            )
            made.shape = layer.num_kv_heads, layer.head_dim, layer.head_dim_v
            made.shared = self.shared
            yield made


@dataclass(slots=True, eq=False, repr=False)
class Pending:
    """New rows that `NumkvLayer.update` has taken and the attention function stores.

    Attributes
    ----------
    layer : weak reference to NumkvLayer
        Where they go; the layer keeps these rows for the next pass, and a cache is freed once nothing holds it.
    keys, values : tensor (batch, num_kv_heads, T, head_dim)
        The rows.
    done : tuple of Plan, Step, Pool and rows in full, or None
        The step that stored them, its pool, and their full-precision copies, for layers that share them.
    weight : tensor or None
        Of latents, what makes K and V of them; see `LatentRows`.
    """

    layer: Any
    keys: Any
    values: Any
    done: tuple[Any, Step, Pool, Any] | None = None
    weight: Any = None


class Rows(torch.Tensor):  # type: ignore[misc]
    """New rows of K or V on their way from `NumkvLayer.update` to the attention function ``numkv``.

    Everything else that would read them raises: it would see the new rows, where it expects all of the cache.
    """

    pending: Pending

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _ASKED:
            with DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is _Tensor.to:  # where it changes nothing
            rest = [*args[1:], *(kwargs or {}).values()]
            if all(x in (args[0].device, args[0].dtype, True, False) for x in rest):
                return args[0]
        name = getattr(func, "__name__", str(func))
        raise NotSupported(
            f"NumkvCache: expected its K and V to be read by the attention function 'numkv', got {name} on them. Call "
            "model.set_attn_implementation('numkv'), or numkv.transformers.use(model). A model that computes with "
            "what the cache gives back, or has attention of its own, needs another cache"
        )

    def __repr__(self, **_: Any) -> str:
        return f"Rows({tuple(self.shape)}, on their way into {self.pending.layer()!r})"


class LatentRows(Rows):
    """New latents on their way from `LatentLayer.update` to the attention function, by way of `expand_kv`.

    transformers multiplies what a cache gives back with the weight that makes K and V of every head (`expand_kv`). Here
    that product is put off: it is noted with the rows, and what it makes has the shapes of K and V, and no content.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        rows = next((x for x in args if isinstance(x, LatentRows)), None)
        if rows is None or func not in _EXPANDING:
            return super().__torch_function__(func, types, args, kwargs)
        with DisableTorchFunctionSubclass():
            if func is functional.linear:
                return rows._multiplied(*args, **kwargs)
            if func is _Tensor.copy_:
                return args[0]
            if func is _Tensor.new_empty:
                shape = args[1] if len(args) == 2 else args[1:]
                return rows._tagged(_nothing(rows, shape))
            found = func(*args, **kwargs)
            if isinstance(found, tuple | list):
                return tuple(rows._tagged(x) for x in found)
            return rows._tagged(found)

    def _multiplied(self, x: Any, weight: Any, bias: Any = None) -> Any:
        """Note the weight of a product with these latents, in place of the product."""
        pending = self.pending
        if x is not self or bias is not None or pending.weight is not None:
            raise NotSupported(
                "NumkvCache: expected one product of latents with a weight, without a bias, got another; use another "
                "cache for this model"
            )
        pending.weight = weight
        return self._tagged(_nothing(self, (*self.shape[:-1], weight.shape[0])))

    def _tagged(self, x: Any) -> Any:
        made = x.as_subclass(LatentRows)
        made.pending = self.pending
        return made


def _nothing(like: Any, shape: Any) -> Any:
    """A tensor of a shape, of one element in memory."""
    return torch.empty(1, dtype=like.dtype, device=like.device).expand(tuple(shape))


class NumkvLayer(CacheLayerMixin):  # type: ignore[misc]
    """K and V of one attention layer.

    Parameters
    ----------
    options : Options
        How rows are stored.
    reach : int
        Earlier tokens that a token may see, so that older ones are dropped; -1 for all.
    """

    is_compileable = False
    is_croppable = True
    #: What its rows lie in.
    pool_class = Pool

    def __init__(self, options: Options, reach: int = -1) -> None:
        super().__init__()
        self.options = options
        self.reach = reach
        self.is_sliding = reach >= 0
        self.record_past = False
        self.block_size = _BLOCK_SIZE
        while 0 <= reach < 4 * self.block_size and self.block_size > _SMALLEST:
            self.block_size //= 2
        # A `BatchMetadata`, a `Pool`, and what else of newest and first tokens is in full; None before the first pass.
        self.metadata: Any = None
        self.pool: Any = None
        self.ring: Any = None
        #: What a compiled call of the layer needs: see `numkv.transformers.attention`.
        self.bound: Any = None
        # Of the last pass of one token: shapes, dtype, what is pending, and what comes back for it.
        self._rows: tuple[Any, ...] | None = None
        options.shared.layers.add(self)

    @property
    def takes_channels(self) -> bool:
        """Whether it sees more tokens than keys by channel keep in full."""
        return not 0 <= self.reach < _GROUP

    @property
    def _access(self) -> Access:
        return self.options.shared.access  # a pass goes through all layers

    def __repr__(self) -> str:
        reach = f", reach={self.reach}" if self.reach >= 0 else ""
        return f"{type(self).__name__}({self.get_seq_length()} tokens{reach})"

    # -- rows

    def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
        """Make the buffers for K and V of these shapes."""
        _check_rows(key_states, value_states)
        batch, heads, _, dim = map(int, key_states.shape)
        options = self.options
        own = _own_kind(key_states), _own_kind(value_states)
        kinds = options.k_kind or own[0], options.v_kind or own[1]
        shape = heads, dim, int(value_states.shape[3])
        if options.shape is not None:
            check_profiled(shape, options.shape)
        self.block_size = max(self.block_size, options.group_tokens)
        blocks = max(1, self.reserved(batch)) if options.shared.max_nbytes is None else 0
        self.allocate(batch, blocks, shape, kinds, own)

    def reserved(self, batch: int) -> int:
        """Blocks that hold the capacity asked for."""
        tokens, size = self.options.capacity, self.block_size
        if self.reach >= 0:
            tokens = min(tokens, self.reach + size)
        return batch * -(-tokens // size)

    def allocate(
        self, batch: int, num_blocks: int, shape: tuple[int, int, int], kinds: tuple[Kind, Kind], own: tuple[Any, Any]
    ) -> None:  # fmt: skip
        """Make buffers without tokens.

        Parameters
        ----------
        batch, num_blocks : int
            Sequences, and blocks for all of them.
        shape : tuple of int
            Kv heads, and elements of K and of V.
        kinds, own : tuple of Kind
            Storage kinds of K and V. Kinds of the full-precision copies of newest and first tokens, if there are any.
        """
        options = self.options
        size = self.block_size = max(self.block_size, options.group_tokens)
        self.metadata = BatchMetadata.empty(batch, size, num_blocks, self.reach)
        self.pool = self.pool_class.allocate(
            targets.get("cpu"), (num_blocks, shape[0], size), *shape[1:], *kinds, options.rotate
        )  # fmt: skip
        self.ring = None
        if options.group_tokens:
            self.ring = NewestTokenGroups(self.pool, own, batch, options.num_sink_tokens)
        elif options.full_precision is not None:
            self.ring = FullPrecisionRing(self.pool, own, batch, options.full_precision)
        self.is_initialized = True

    def update(
        self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Take new rows; they are stored by the attention function, which knows which of them are padding."""
        made = self._rows
        if (
            made is not None and key_states.shape == made[0] and value_states.shape == made[1]
            and key_states.dtype is made[2] is value_states.dtype and not is_dynamo_compiling()
        ):  # fmt: skip
            pending: Pending = made[3]
            pending.keys, pending.values, pending.done = key_states, value_states, None
            return made[4]
        key, value = key_states.as_subclass(Rows), value_states.as_subclass(Rows)
        key.pending = value.pending = pending = Pending(weakref.ref(self), key_states, value_states)
        self._rows = None
        if key_states.shape[2] == 1 and not is_dynamo_compiling():  # as the next ones will be
            shapes = key_states.shape, value_states.shape
            self._rows = (*shapes, key_states.dtype, pending, (key, value))
        return key, value

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "bound": None, "_rows": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.options.shared.layers.add(self)

    def begin(self, key_states: Any, value_states: Any) -> Any:
        """The pool that new rows meet, checked."""
        batch, heads, _, dim = key_states.shape
        dims = (heads, dim, value_states.shape[3])
        if key_states.shape[:3] != value_states.shape[:3]:
            raise DimensionMismatch(
                f"`value_states`: expected batch, heads and tokens of `key_states`, {tuple(key_states.shape[:3])}, "
                f"got {tuple(value_states.shape[:3])}",
                expected=tuple(key_states.shape[:3]),
                actual=tuple(value_states.shape[:3]),
            )
        if self.metadata is None or self.pool is None:
            self.lazy_initialization(key_states, value_states)
        elif self.metadata.columns == 0 and (batch, *dims) != (self.metadata.batch, *self._dims()):
            for layer in self.options.shared.layers:  # after a reset
                if layer.get_seq_length() == 0:
                    layer.drop()
            self.lazy_initialization(key_states, value_states)
        metadata = self.metadata
        if batch != metadata.batch:
            raise DimensionMismatch(
                f"NumkvCache: expected a batch of {metadata.batch}, as is in the cache, got {batch}; call reset() "
                "for another",
                expected=metadata.batch,
                actual=int(batch),
            )
        if dims != self._dims():
            raise DimensionMismatch(
                f"NumkvCache: expected heads and dims of K and V {self._dims()}, got {tuple(map(int, dims))}",
                expected=self._dims(),
                actual=tuple(map(int, dims)),
            )
        return self.pool

    def _dims(self) -> tuple[int, int, int]:
        pool = self.pool
        return int(pool.k.shape[1]), pool.head_dim, pool.head_dim_v

    # -- what transformers asks

    def get_seq_length(self) -> int:
        """Columns so far, padding included."""
        return 0 if self.metadata is None else self.metadata.columns

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Columns that a mask covers, and where it starts."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        """Columns that there may be: -1, as layers grow; of layers that drop tokens how many they may see."""
        return self.reach + 1 if self.reach >= 0 else -1

    @property
    def storage(self) -> str:
        """The kinds of K and V, of latents the one kind; before the first pass what was asked for."""
        pool, options = self.pool, self.options
        both = (pool.k_kind, pool.v_kind) if pool is not None else (options.k_kind, options.v_kind)
        k_kind, v_kind = (str(kind or "the model's") for kind in both)
        said = k_kind if k_kind == v_kind else f"{k_kind}/{v_kind}"
        return f"{said}, rotated" if options.rotate else said

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers."""
        pools = self.pool, None if self.ring is None else self.ring.pool
        return sum(pool.nbytes for pool in pools if pool is not None)

    @property
    def block_nbytes(self) -> int:
        """Bytes of a block."""
        buffers = [x for _, x in self.pool.stored]
        grow = [x.words for x in buffers]
        grow += [x.scales for x in buffers if x.kind.scales_per != "head"]
        return sum(math.prod(x.shape[1:]) * x.dtype.itemsize for x in grow)

    def activate_past_recording(self) -> None:
        """Keep what leaves the reach until the next crop."""
        self.record_past = True

    def changed(self, metadata: BatchMetadata, move: Move | None = None, ring: Any = None) -> Held:
        """What it holds with other metadata: these, its pool or the one that they say, and what is in full."""
        pool = self.pool
        if move is not None:
            num_blocks, source, target = move
            pool = self.pool.like(num_blocks)
            self.pool.copy_blocks(source, pool, target)
        return metadata, pool, self.ring if ring is None else ring

    @uninterrupted
    def take(self, held: Held) -> None:
        """Hold what `changed` gave."""
        self.metadata, self.pool, self.ring = held

    def change(self, metadata: BatchMetadata, move: Move | None = None) -> None:
        """Take new metadata, and another pool if they say so."""
        self.take(self.changed(metadata, move))

    def resize(self, num_blocks: int) -> None:
        """Take a pool of so many blocks."""
        if num_blocks != self.metadata.num_blocks:
            self.change(*self.metadata.packed(num_blocks))

    @uninterrupted
    def drop(self) -> None:
        """Forget all tokens, and have no buffers."""
        self.metadata = self.pool = self.ring = self.bound = None
        self.is_initialized = False

    def emptied(self) -> Held:
        """What it holds without tokens; the buffers stay if the next batch is of the same size."""
        at = self.metadata
        empty = BatchMetadata.empty(at.batch, at.block_size, at.num_blocks, at.reach)
        return self.changed(empty, None, self.ring and self.ring.cropped(empty.lengths))

    def cropped(self, columns: int) -> Held:
        """What it holds without the last columns."""
        left, move = self.metadata.cropped(columns, kept=self.record_past)
        return self.changed(left, move, self.ring and self.ring.cropped(left.lengths))

    def selected(self, order: tuple[int, ...]) -> Held:
        """What it holds with sequences in another order; those that are taken twice share their blocks."""
        chosen = self.metadata.selected(order)
        return self.changed(
            chosen, None, self.ring and self.ring.selected(np.array(order, np.int64))
        )

    def offload(self) -> None:
        """Not on the CPU."""
        raise NotSupported(
            "NumkvCache: expected to stay in host memory, got a call to offload a layer"
        )

    prefetch = offload

    def reset(self, *_: Any) -> None:
        """Refuse to change a layer without the others: see `NumkvCache.reset`, `crop` and `reorder_cache`."""
        raise NotSupported(
            "NumkvCache: expected a call of the cache's reset, crop or reorder_cache, which change all layers, got one "
            "of a layer's"
        )

    crop = reorder_cache = reset


class LatentLayer(NumkvLayer):
    """Latents of one attention layer with their rotary keys, a row for each token."""

    pool_class = LatentPool

    def update(
        self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any
    ) -> tuple[Any, Any]:
        """Take latents ``(batch, 1, T, rank)`` and rotary keys ``(batch, 1, T, rotary_dim)``."""
        # V is the first part of a row, and is stored with it.
        pending = Pending(weakref.ref(self), torch.cat([key_states, value_states], -1), key_states)
        key, value = key_states.as_subclass(LatentRows), value_states.as_subclass(LatentRows)
        key.pending = value.pending = pending
        return key, value


class HybridLayer(LinearAttentionLayer, NumkvLayer):  # type: ignore[misc]
    """A layer with attention, and a linear state that transformers itself stores."""

    is_compileable = False

    def __init__(self, options: Options, reach: int = -1, number_of_states: int = 1) -> None:
        NumkvLayer.__init__(self, options, reach)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Make the buffers of attention, or the states."""
        (NumkvLayer if args else LinearAttentionLayer).lazy_initialization(self, *args, **kwargs)

    def activate_past_recording(self) -> None:
        """Keep what a crop may need, in both."""
        LinearAttentionLayer.activate_past_recording(self)
        NumkvLayer.activate_past_recording(self)

    offload = prefetch = NumkvLayer.offload
    get_max_length = NumkvLayer.get_max_length
    reset = crop = reorder_cache = NumkvLayer.reset


def check_profiled(wanted: tuple[int, int, int], got: tuple[int, ...]) -> None:
    """Refuse a profile whose layer has other kv heads and elements of K and V than the model's."""
    if wanted != got:
        raise DimensionMismatch(
            f"`profile`: expected a layer of {wanted[0]} kv heads and rows of {wanted[1]} and {wanted[2]} elements, as "
            f"this model has, got one of {got[0]}, {got[1]} and {got[2]}; make another with `numkv fit`",
            expected=wanted,
            actual=got,
        )


def check_depth(held: int, wanted: int) -> None:
    """Refuse a model with more layers than a cache has."""
    if wanted > held:
        raise DimensionMismatch(
            f"NumkvCache: expected a model of at most {held} layers, as the cache has, got one of {wanted}; make the "
            "cache by NumkvCache(model.config)",
            expected=held,
            actual=wanted,
        )


def _check_rows(key_states: Any, value_states: Any) -> None:
    for name, x in (("key_states", key_states), ("value_states", value_states)):
        if x.ndim != 4:
            raise DimensionMismatch(
                f"`{name}`: expected (batch, num_kv_heads, tokens, head_dim), got {tuple(x.shape)}",
                expected=4,
                actual=x.ndim,
            )
        if x.device.type != "cpu":
            raise NotSupported(
                f"NumkvCache: expected a model on the CPU, got `{name}` on {x.device}"
            )


def _own_kind(x: Any) -> Kind:
    """Return the kind that stores a tensor's elements as they are."""
    found = kind_of_dtype(array_of(x.detach()[:0], "key_states").dtype)
    if found is None:
        raise UnsupportedDType(f"NumkvCache: expected K and V in a float dtype, got {x.dtype}")
    return found
