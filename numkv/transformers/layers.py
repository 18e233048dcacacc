"""Cache layers whose rows are numkv's, and what travels from them to the attention function."""

from __future__ import annotations

from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass
from torch.compiler import is_dynamo_compiling

from numkv import targets
from numkv.access import Access
from numkv.errors import DimensionMismatch, NotSupported, UnsupportedDType
from numkv.interrupts import uninterrupted
from numkv.kinds import Kind, kind_of_dtype
from numkv.storage.pool import Pool
from numkv.torch.tensors import array_of
from numkv.transformers.books import Books, Shrink, Step
from numkv.transformers.bound import BoundLayer
from numkv.transformers.internals import CacheLayerMixin, LinearAttentionLayer
from numkv.transformers.options import Options

_Tensor = torch.Tensor
# What may be asked of rows on their way; everything else would compute with them.
_ASKED = {
    _Tensor.shape.__get__, _Tensor.dtype.__get__, _Tensor.device.__get__, _Tensor.ndim.__get__,
    _Tensor.layout.__get__, _Tensor.requires_grad.__get__, _Tensor.size, _Tensor.dim, _Tensor.__len__,
    _Tensor.is_floating_point, _Tensor.numel, _Tensor.is_contiguous, _Tensor.stride,
}  # fmt: skip


class Pending:
    """New rows that `NumkvLayer.update` has taken and the attention function stores.

    Attributes
    ----------
    layer : NumkvLayer
        Where they go.
    keys, values : tensor (batch, num_kv_heads, T, head_dim)
        The rows.
    done : tuple of Plan, Step and Pool, or None
        The step that stored them, and the pool then, for layers that share them.
    weight : tensor or None
        Of latents, what makes K and V of them; see `numkv.transformers.latents`.
    """

    __slots__ = ("done", "keys", "layer", "values", "weight")

    def __init__(self, layer: NumkvLayer, keys: Any, values: Any) -> None:
        self.layer = layer
        self.keys = keys
        self.values = values
        self.done: tuple[Any, Step, Pool] | None = None
        self.weight: Any = None


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
        return f"Rows({tuple(self.shape)}, on their way into {self.pending.layer!r})"


class NumkvLayer(CacheLayerMixin):  # type: ignore[misc]
    """K and V of one attention layer.

    Parameters
    ----------
    options : Options
        How rows are stored; one object for all layers of a cache.
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
        self.block_size = options.block_size_for(reach)
        self.books: Books | None = None
        self.pool: Pool | None = None
        self.recent = options.recent()
        self.bound: BoundLayer | None = None
        # Of the last pass of one token: shapes, dtype, what is pending, and what comes back for it.
        self._rows: tuple[Any, ...] | None = None

    @property
    def _access(self) -> Access:
        return self.options.access  # a pass goes through all layers

    def __repr__(self) -> str:
        reach = f", reach={self.reach}" if self.reach >= 0 else ""
        return f"{type(self).__name__}({self.get_seq_length()} tokens{reach})"

    # -- rows

    def lazy_initialization(self, key_states: Any, value_states: Any) -> None:
        """Make the buffers for K and V of these shapes."""
        _check_rows(key_states, value_states)
        batch, heads, _, dim = key_states.shape
        k_kind, v_kind = self.options.kinds(_kind_of(key_states), _kind_of(value_states))
        self.books = self.options.empty_books(int(batch), self.block_size, self.reach)
        shape = (self.books.num_blocks, int(heads), self.block_size)
        self.pool = self.pool_class.allocate(
            targets.get("cpu"), shape, int(dim), int(value_states.shape[3]), k_kind, v_kind,
            self.options.rotate,
        )  # fmt: skip
        if self.recent is not None:
            kinds = _kind_of(key_states), _kind_of(value_states)
            dims = int(dim), int(value_states.shape[3])
            self.recent.make(self.pool.target, int(batch), int(heads), dims, kinds)
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
            rows: tuple[Any, Any] = made[4]
            return rows
        key, value = key_states.as_subclass(Rows), value_states.as_subclass(Rows)
        key.pending = value.pending = pending = Pending(self, key_states, value_states)
        self._rows = None
        if key_states.shape[2] == 1 and not is_dynamo_compiling():  # as the next ones will be
            shapes = key_states.shape, value_states.shape
            self._rows = (*shapes, key_states.dtype, pending, (key, value))
        return key, value

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "bound": None, "_rows": None}

    def begin(self, key_states: Any, value_states: Any) -> tuple[Books, Pool]:
        """The books and the pool that new rows meet, both checked."""
        batch, heads, _, dim = key_states.shape
        dims = (heads, dim, value_states.shape[3])
        if key_states.shape[:3] != value_states.shape[:3]:
            raise DimensionMismatch(
                f"`value_states`: expected batch, heads and tokens of `key_states`, {tuple(key_states.shape[:3])}, "
                f"got {tuple(value_states.shape[:3])}",
                expected=tuple(key_states.shape[:3]),
                actual=tuple(value_states.shape[:3]),
            )
        if self.books is None or self.pool is None:
            self.lazy_initialization(key_states, value_states)
        elif self.books.columns == 0 and (batch, *dims) != (self.books.batch, *self._dims()):
            self.lazy_initialization(key_states, value_states)  # after a reset
        books, pool = self.books, self.pool
        assert books is not None
        assert pool is not None
        if batch != books.batch:
            raise DimensionMismatch(
                f"NumkvCache: expected a batch of {books.batch}, as is in the cache, got {batch}; call reset() "
                "for another",
                expected=books.batch,
                actual=int(batch),
            )
        if dims != self._dims():
            raise DimensionMismatch(
                f"NumkvCache: expected heads and dims of K and V {self._dims()}, got {tuple(map(int, dims))}",
                expected=self._dims(),
                actual=tuple(map(int, dims)),
            )
        return books, pool

    def _dims(self) -> tuple[int, int, int]:
        pool = self.pool
        assert pool is not None
        return int(pool.k.shape[1]), pool.head_dim, pool.head_dim_v

    def make_room(self, step: Step) -> Pool:
        """The pool with room for a step's rows; the layer's books stay as they are."""
        pool = self.pool
        assert pool is not None
        bigger = pool
        if step.num_blocks != int(pool.k.shape[0]):
            bigger = pool.like(step.num_blocks)
        if step.copies is not None:
            pool.copy_blocks(step.copies[0], bigger, step.copies[1])
        return bigger

    @uninterrupted
    def finish(self, step: Step, pool: Pool) -> None:
        """Take over what holds after a step whose rows are in `pool`."""
        self.pool = pool
        self.change(step.after, step.shrink)

    # -- what transformers asks

    def get_seq_length(self) -> int:
        """Columns so far, padding included."""
        return 0 if self.books is None else self.books.columns

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
        recent = 0 if self.recent is None else self.recent.nbytes
        return recent + (0 if self.pool is None else self.pool.nbytes)

    def activate_past_recording(self) -> None:
        """Keep what leaves the reach until the next crop."""
        self.record_past = True

    @uninterrupted
    def reset(self) -> None:
        """Forget all tokens; the buffers stay if the next batch is of the same size."""
        books = self.books
        if books is not None:
            self.books = self.options.empty_books(
                books.batch, self.block_size, self.reach, books.num_blocks
            )
        if self.recent is not None:
            self.recent.reset()

    def change(self, books: Books, shrink: Shrink | None = None) -> None:
        """Take new books, and a smaller pool if they say so."""
        if shrink is not None:
            pool = self.pool
            assert pool is not None
            num_blocks, source, target = shrink
            self.pool = pool.like(num_blocks)
            pool.copy_blocks(source, self.pool, target)
        self.books = books

    def cropped(self, columns: int) -> tuple[Books, Shrink | None]:
        """The books without the last columns, and without what is then out of reach."""
        assert self.books is not None
        books = self.books.cropped(columns, kept=self.record_past)
        return books.dropping().shrunk() if self.reach >= 0 else (books, None)

    @uninterrupted
    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last ``-tokens_to_remove`` columns."""
        removed = columns_to_crop(tokens_to_remove)
        if self.books is not None:
            self.change(*self.cropped(removed))
            self.crop_recent()

    def crop_recent(self) -> None:
        """Forget what the books have no more, among tokens in full precision."""
        if self.recent is not None and self.books is not None:
            self.recent.crop(self.books)

    @uninterrupted
    def reorder_cache(self, beam_idx: Any) -> None:
        """Take sequences in another order; those that are taken twice share their blocks."""
        if self.books is not None:
            rows = beam_idx.cpu().numpy()
            self.change(self.books.selected(rows))
            self.select_recent(rows)

    def select_recent(self, rows: Any) -> None:
        """Take sequences in another order, among tokens in full precision."""
        if self.recent is not None:
            self.recent.select(rows)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Take each sequence so many times."""
        if self.books is not None:
            self.reorder_cache(torch.arange(self.books.batch).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Any) -> None:
        """Take some sequences."""
        if self.books is not None:
            self.reorder_cache(torch.arange(self.books.batch)[indices.cpu()])

    def offload(self) -> None:
        """Not on the CPU."""
        raise NotSupported(
            "NumkvCache: expected to stay in host memory, got a call to offload a layer"
        )

    prefetch = offload


class HybridLayer(LinearAttentionLayer, NumkvLayer):  # type: ignore[misc]
    """A layer with attention beside a linear state, which is transformers' own."""

    is_compileable = False

    def __init__(self, options: Options, reach: int = -1, number_of_states: int = 1) -> None:
        NumkvLayer.__init__(self, options, reach)
        LinearAttentionLayer.__init__(self, number_of_states=number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Make the buffers of attention, or the states."""
        (NumkvLayer if args else LinearAttentionLayer).lazy_initialization(self, *args, **kwargs)

    def get_max_length(self) -> int:
        """See `NumkvLayer.get_max_length`."""
        return NumkvLayer.get_max_length(self)

    def activate_past_recording(self) -> None:
        """Keep what a crop may need, in both."""
        LinearAttentionLayer.activate_past_recording(self)
        NumkvLayer.activate_past_recording(self)

    def reset(self) -> None:
        """Forget all tokens and states."""
        LinearAttentionLayer.reset(self)
        NumkvLayer.reset(self)

    def crop(self, tokens_to_remove: int) -> None:
        """Remove tokens from both."""
        self.crop_states(tokens_to_remove)
        NumkvLayer.crop(self, tokens_to_remove)

    def crop_states(self, tokens_to_remove: int) -> None:
        """Remove tokens from the linear states."""
        LinearAttentionLayer.crop(self, tokens_to_remove)

    def reorder_cache(self, beam_idx: Any) -> None:
        """Take sequences in another order, in both."""
        self.reorder_states(beam_idx)
        NumkvLayer.reorder_cache(self, beam_idx)

    def reorder_states(self, beam_idx: Any) -> None:
        """Take linear states in another order."""
        LinearAttentionLayer.reorder_cache(self, beam_idx)

    offload = prefetch = NumkvLayer.offload


def columns_to_crop(tokens_to_remove: int) -> int:
    """How many columns a call of `crop` removes."""
    if tokens_to_remove > 0:
        raise ValueError(
            f"`crop`: expected minus the number of tokens to remove, got {tokens_to_remove}"
        )
    return -int(tokens_to_remove)


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


def _kind_of(x: Any) -> Kind:
    """The kind that stores a tensor's elements as they are."""
    found = kind_of_dtype(array_of(x.detach()[:0], "key_states").dtype)
    if found is None:
        raise UnsupportedDType(f"NumkvCache: expected K and V in a float dtype, got {x.dtype}")
    return found
