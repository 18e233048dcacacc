"""`LayeredCache`: what caches that hold the buffers of layers have in common, of cells or of an encoder's rows."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from numkv import targets
from numkv.access import Access
from numkv.arrays import CacheArrays
from numkv.caches.layer_spec import LayerSpec, spec_of, storage_of
from numkv.caches.multi.base import MultiSequenceCache
from numkv.caches.multi.saved import SavedLayer, SavedLayers, SavedScales
from numkv.errors import NumkvError
from numkv.kinds import Kind
from numkv.numbers import is_number
from numkv.snapshots.fields import claims
from numkv.snapshots.snapshot import Options, Snapshot, Source, Tensor, fill_all
from numkv.storage.buffer import Buffer, check_scales
from numkv.storage.own_kernels import cache_arrays
from numkv.storage.pool import Pool
from numkv.storage.saved import row_tensors
from numkv.targets.base import Array, Target

#: Table, lengths and slots of `arrays`, on the target; None for those of length 0.
Tables = tuple[Array | None, Array | None, Array | None]


class HeadScales:
    """Scales of kv heads, K's and V's, by layer; 1 by default."""

    def __init__(self) -> None:
        self._by_layer: dict[int, dict[str, Any]] = {}

    def copy(self) -> HeadScales:
        """Scales of its own; arrays in it are never changed."""
        new = HeadScales()
        new._by_layer.update(self._by_layer)
        return new

    def saved(self) -> dict[SavedScales, NDArray[Any]]:
        """The scales that were set, for a snapshot, also of layers without rows."""
        return {
            SavedScales(layer, side, len(x) if x.ndim else 0): np.atleast_1d(x)
            for layer, by_side in self._by_layer.items()
            for side, x in by_side.items()
        }

    def set(
        self, layer: int, pool: Pool | None, kinds: tuple[Kind, Kind], k: Any = None, v: Any = None
    ) -> None:
        """Set the scales of a layer, and apply them if it is allocated already.

        Parameters
        ----------
        layer : int
            Which layer.
        pool : Pool or None
            Its buffers, if it has any. If not, the number of heads is checked when it gets them.
        kinds : tuple of Kind
            Kinds of K and of V.
        k, v : float or float32 array (num_kv_heads,), optional
            The scales; None leaves them as they are.
        """
        given = {name: x for name, x in (("k", k), ("v", v)) if x is not None}
        # Kept as they were checked: NumPy makes no floats of some arrays of other libraries, which a check takes.
        if pool is not None:
            pool.set_scales(k, v)
            found = {n: pool.target.to_host(pool.buffer(n).scales) for n in given}
        else:
            found = {
                n: check_scales(kinds[n == "v"], n, x, "num_kv_heads") for n, x in given.items()
            }
        new = {n: np.array(x if is_number(x) else found[n], np.float32) for n, x in given.items()}
        self._by_layer[layer] = self._by_layer.get(layer, {}) | new

    def apply(self, layer: int, pool: Pool) -> None:
        """Give the buffers of a layer that has just been allocated their scales."""
        for name, scales in self._by_layer.get(layer, {}).items():
            buffer, given = pool.buffer(name), scales if scales.ndim else float(scales)
            found = buffer.check_scales(f"{name} of set_scales", given)
            buffer.scales[:] = buffer.target.asarray(found)


class LayeredCache(MultiSequenceCache):
    """A cache with buffers for each layer that has been put: one block of as many tokens as there is room for."""

    __saved__: ClassVar[type[SavedLayers]]
    # Set by `init`.
    _k_kind: Kind
    _v_kind: Kind
    _target: Target
    _rotate: bool
    _permuted_v: bool

    def __init__(self) -> None:
        super().__init__()
        self._layers: dict[int, Pool] = {}
        self._head_scales = HeadScales()
        # How often each layer was put, twice; odd while it is being put.
        self._puts: dict[int, int] = {}
        self._generation = 0
        # What `arrays` gave, and the generation that it is of.
        self._given: dict[int, tuple[int, CacheArrays]] = {}

    def __runs_on__(self) -> tuple[Target, Any]:
        pool = next(iter(self._layers.values()), None)
        return getattr(self, "_target", targets.get("cpu")), None if pool is None else pool.k

    # -- what it is

    @property
    def target(self) -> str:
        """Name of the target."""
        self._check_ready()
        return self._target.name

    @property
    def layers(self) -> dict[int, LayerSpec]:
        """The descriptions of all layers with rows, by number."""
        self._check_ready()
        return {layer: self._spec(pool) for layer, pool in list(self._layers.items())}

    def _spec(self, pool: Pool) -> LayerSpec:
        """Return the description of a layer with these buffers."""
        return spec_of(pool)

    @property
    def nbytes(self) -> int:
        """Bytes of the K and V buffers of all layers so far, scales included."""
        self._check_ready()
        return sum(pool.nbytes for pool in list(self._layers.values()))

    def __repr__(self) -> str:
        name = type(self).__name__
        if self._state != "ready":
            return f"{name}({'closed' if self._state == 'closed' else 'before init'})"
        kinds = storage_of(self._k_kind, self._v_kind, self._rotate)
        return (
            f"{name}({self._describe()}, layers={len(self._layers)}, kind={kinds}, "
            f"target={self._target.name}, nbytes={self.nbytes})"
        )

    @abstractmethod
    def _describe(self) -> str: ...

    # -- reads of a layer during a put of it

    def _begin_reading(self, layer: int) -> int:
        """Refuse a layer that is being put; for `_end_reading`."""
        count = self._puts.get(layer, 0)
        if count & 1:
            raise self._overtaken(layer)
        return count

    def _end_reading(self, layer: int, count: int) -> None:
        """Refuse a result from rows that were put meanwhile."""
        if self._puts.get(layer, 0) != count:
            raise self._overtaken(layer)

    def _overtaken(self, layer: int) -> NumkvError:
        return NumkvError(
            f"{type(self).__name__}: layer {layer} was put while it was read, so there is no result; read it "
            "before or after"
        )

    # -- arrays

    def _cache_arrays(self, layer: int) -> CacheArrays:
        generation = self._generation
        found = self._given.get(layer)
        if found is None or found[0] != generation:
            pool = self._layer(layer)
            by_token = Pool(_by_token(pool.k_buffer), _by_token(pool.v_buffer))
            found = generation, cache_arrays(by_token, *self._tables(layer))
            self._given[layer] = found
        return found[1]

    @abstractmethod
    def _tables(self, layer: int) -> Tables:
        """Return what `arrays` has beside buffers."""

    def _changed(self) -> None:
        """Say that what `arrays` gave so far is out of date."""
        self._generation += 1
        self._given.clear()

    def _layer(self, layer: int) -> Pool:
        pool = self._layers.get(layer)
        if pool is None:
            raise IndexError(
                f"`layer`: expected a layer that has been put, {sorted(self._layers)}, got {layer}"
            )
        return pool

    # -- rows

    def _new_pool(self, layer: int, shape: tuple[int, int, int], dims: tuple[int, int]) -> Pool:
        """Return buffers for a layer, which are not its own yet; with the scales of heads that were set."""
        kinds = self._k_kind, self._v_kind
        made = Pool.allocate(self._target, shape, *dims, *kinds, self._rotate)
        self._head_scales.apply(layer, made)
        return made

    def _rows_of(self, pool: Pool, part: slice) -> tuple[Array, Array]:
        """Return a part of K and V as `get` shows them."""
        target, v = self._target, pool.rows("v", 0, part)
        v = target.dim_major(v) if self._permuted_v else target.token_major(v)
        return target.token_major(pool.rows("k", 0, part)), v

    # -- its life

    def _close(self) -> None:
        self._state = "closed"
        self._layers.clear()
        self._changed()

    def _copied(self, access: Access) -> Self:
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        new._access, new._puts, new._given = access, {}, {}
        new._layers = {layer: pool.copy() for layer, pool in self._layers.items()}
        new._head_scales = self._head_scales.copy()
        return new

    # -- saved and loaded

    @abstractmethod
    def _refuse_reported(self) -> None:
        """Wait for launched kernels, and raise if rows were NaN or infinite."""

    @abstractmethod
    def _values(self) -> dict[str, Any]:
        """Return the values of a snapshot besides layers."""

    @abstractmethod
    def _slots(self, pool: Pool) -> NDArray[np.int64]:
        """Return where the rows of a layer lie."""

    def _books(self) -> dict[str, NDArray[Any]]:
        """Small arrays of a snapshot."""
        return {}

    def __snapshot__(self) -> Snapshot:
        """See `numkv.snapshots.snapshot`."""
        self._check_ready()
        self._refuse_reported()
        scales = self._head_scales.saved()
        saved = self.__saved__(
            k_kind=self._k_kind, v_kind=self._v_kind, rotation=0 if self._rotate else None,
            layers=[self._saved_layer(*x) for x in self._layers.items()], set_scales=list(scales), **self._values(),
        )  # fmt: skip
        arrays = self._books() | {of.tensor: x for of, x in scales.items()}
        return Snapshot(saved, self._tensors(), [(self, True)], arrays)

    def _saved_layer(self, layer: int, pool: Pool) -> SavedLayer:
        heads = int(pool.k.shape[1])
        dims = {"head_dim": pool.head_dim, "head_dim_v": pool.head_dim_v}
        return SavedLayer(layer=layer, num_kv_heads=heads, **dims)

    def _tensors(self) -> list[Tensor]:
        layers = self._layers.items()
        return [x for at, pool in layers for x in row_tensors(pool, at, self._slots(pool))]

    @classmethod
    @abstractmethod
    def _empty(cls, saved: Any, source: Source, options: Options) -> Self:
        """A cache as it was saved, but for its layers."""

    @classmethod
    def __restore__(cls, saved: SavedLayers, source: Source, options: Options) -> Self:
        """See `numkv.snapshots.snapshot`."""
        saved.check_shift(options.shift)
        made, kinds = cls._empty(saved, source, options), (saved.k_kind, saved.v_kind)
        for x in saved.layers:
            shape, dims = (1, x.num_kv_heads, saved.room(x)), (x.head_dim, x.head_dim_v)
            made._layers[x.layer] = made._new_pool(x.layer, shape, dims)
        fill_all(source, made._tensors())
        for of in saved.set_scales:
            scales: Any = source.array(of.tensor)
            with claims(f"{of.tensor!r}"):
                given = {of.side: scales if of.heads else float(scales[0])}
                made._head_scales.set(of.layer, made._layers.get(of.layer), kinds, **given)
        return made

    def _pickled(self) -> dict[str, Any]:
        if self._state != "ready":
            return self.__dict__.copy()
        if not self._target.values_on_host:
            raise NumkvError(
                f"{type(self).__name__}: expected a cache on the CPU to pickle, got one on "
                f"{self._target.name}, whose memory belongs to this process; save it, or copy it with copy()"
            )
        return self._copied(Access()).__dict__

    # -- its proof

    def _check_layers(
        self, layers: dict[int, Pool], num_tokens: int, stored: NDArray[np.int64]
    ) -> None:
        """Compare layers' buffers with the cache's metadata; rows of `stored` tokens must have finite scales."""
        for layer, pool in sorted(layers.items()):
            heads = int(pool.k.shape[1])
            for name, kind in (("k", self._k_kind), ("v", self._v_kind)):
                buffer = pool.buffer(name)
                where, rows = f"{name} of layer {layer}", (1, heads, num_tokens)
                if buffer.kind != kind:
                    raise NumkvError(
                        f"check: {where} is of kind {buffer.kind}, the cache of {kind}"
                    )
                shapes = (tuple(buffer.words.shape[:3]), tuple(buffer.scales.shape))
                if shapes != (rows, kind.scale_shape(rows, buffer.dim)):
                    raise NumkvError(
                        f"check: {where} has shape {shapes[0]}, and scales of shape {shapes[1]}, where there are "
                        f"{num_tokens} tokens"
                    )
                if kind.is_scaled and not buffer.has_sound_scales(np.zeros_like(stored), stored):
                    raise NumkvError(
                        f"check: scales of {where} are not finite; rows with NaN or infinity were put unchecked"
                    )


def _by_token(buffer: Buffer) -> Buffer:
    """A buffer of one block, seen as one of blocks of one token."""
    by_token = buffer.target.by_token
    scales = by_token(buffer.scales) if buffer.kind.has_scales else buffer.scales
    return replace(buffer, words=by_token(buffer.words), scales=scales)
