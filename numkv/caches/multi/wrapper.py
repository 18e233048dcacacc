"""`WrapperCache`: several caches that go through the same passes, for models whose layers differ.

Some layers have a sliding window, others attend to everything, and some attend to an encoder's rows. Each kind of layer
has a cache of its own, a *child*, and all children take part in every pass. A change is planned for all children before
the first is changed, so that it happens to all of them or to none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Self

from numkv.access import Access, whole
from numkv.caches.layer_spec import LayerSpec
from numkv.caches.multi.arguments import elements
from numkv.caches.multi.base import MultiSequenceCache, WithRows
from numkv.caches.multi.causal import CausalCache
from numkv.caches.multi.encoder import EncoderCache
from numkv.drawing.page import drawn
from numkv.errors import NotSupported
from numkv.numbers import check_index
from numkv.snapshots.fields import Fields, expect
from numkv.snapshots.saved import Saved, Spec, entry
from numkv.snapshots.snapshot import Options, Snapshot, Source, Under
from numkv.targets.base import Target

#: More layers than any model has; an iterable that names more may go on for ever.
_MOST_LAYERS = 2**20


def _read_children(fields: Fields, name: str, _: Any) -> list[tuple[Any, Saved]]:
    classes = {x.__name__: x for x in (CausalCache, EncoderCache, WrapperCache)}
    each = [(classes[x.text("class", list(classes))], x) for x in fields.parts(name)]
    expect(bool(each), "no caches")
    return [(of, of.__saved__.read(x)) for of, x in each]


@dataclass(kw_only=True)
class SavedWrapper(Saved):
    """A `WrapperCache`."""

    layout = "several"

    caches: list[Any] = entry(_read_children)
    layer_types: list[int] | None = entry(
        lambda f, name, x: (
            None if f.get(name) is None else f.integers(name, most=len(x["caches"]) - 1)
        )
    )
    layer_type: int = entry(lambda f, name, x: f.integer(name, most=len(x["caches"]) - 1))

    def specs(self) -> dict[str, Spec]:
        """See `Saved.specs`."""
        each = enumerate(self.caches)
        return {f"{i}.{n}": spec for i, (_, x) in each for n, spec in x.specs().items()}

    @property
    def nbytes(self) -> int:
        """See `Saved.nbytes`."""
        return sum(x.nbytes for _, x in self.caches)


@drawn
class WrapperCache(MultiSequenceCache):
    """Children that are changed together.

    Parameters
    ----------
    *caches : CausalCache or EncoderCache
        The children, before their `init`. They may have been configured one by one.
    layer_types : iterable of int, optional
        Which child each layer belongs to. Without it, `set_layer_type` chooses the child for the calls that follow.

    Raises
    ------
    ValueError
        If there are no children, or one is listed twice.
    TypeError
        If a child is no such cache, or `layer_types` are no integers.
    IndexError
        If `layer_types` names a child that is not there.

    Notes
    -----
    What a cache tells of itself, a wrapper tells of each child: ``kind``, ``nbytes``, ``sequences``, ``positions(seq)``
    and the like are tuples. Threads: it and its children are one cache, see `numkv.CausalCache`; so are wrappers of
    wrappers. Threads that read take `layer_types`, as there is one layer type for all of them.

    Examples
    --------
    >>> import numpy as np, numkv
    >>> sliding, causal = numkv.CausalCache(window_left=1), numkv.CausalCache()
    >>> cache = numkv.WrapperCache(sliding, causal, layer_types=[0, 1])
    >>> cache.init("fp32", max_sequences=1, capacity=16, max_batch=4)
    >>> cache.start_forward(numkv.Batch(positions=[0, 1, 2], sequences=[0, 0, 0]))
    >>> rows = np.ones((3, 2, 8), np.float32)
    >>> for layer in range(2):
    ...     cache.put(layer, rows, rows)
    >>> cache.get(0)[2][2], cache.get(1)[2][2]
    (array([-inf,   0.,   0.], dtype=float32), array([0., 0., 0.], dtype=float32))
    """

    __saved__ = SavedWrapper

    def __init__(
        self, *caches: MultiSequenceCache, layer_types: Iterable[int] | None = None
    ) -> None:
        super().__init__()
        if not caches or len({id(child) for child in caches}) < len(caches):
            raise ValueError("`caches`: expected one cache or more, each of them once")
        for child in caches:
            if not isinstance(child, MultiSequenceCache):
                raise TypeError(
                    f"`caches`: expected caches, each as an argument, got {type(child).__name__}; "
                    "pass a list as WrapperCache(*caches)"
                )
        self._children, self._type = caches, 0
        self._layer_types: list[int] | None = None
        if layer_types is not None:
            self._layer_types = []
            for i in elements("layer_types", layer_types):
                self._layer_types.append(check_index("layer_types", i, len(caches)))
                if len(self._layer_types) > _MOST_LAYERS:
                    raise ValueError(
                        f"`layer_types`: expected at most {_MOST_LAYERS} layers, got more"
                    )
        self._share()

    def _share(self) -> None:
        """Let one writer at a time change this cache or its children, and theirs."""
        for cache in self._every():
            cache._access = self._access

    # -- children

    @property
    def caches(self) -> tuple[MultiSequenceCache, ...]:
        """The children."""
        return self._children

    @whole
    def set_layer_type(self, i: int) -> None:
        """Choose the child for the calls that follow; the next `start_forward` goes back to the first.

        With `layer_types`, it only chooses the `underlying_cache`. Reader threads should use `layer_types`, as all
        threads share this choice.

        Parameters
        ----------
        i : int
            Which child.

        Raises
        ------
        IndexError
            If there is no such child.
        """
        self._type = check_index("i", i, len(self._children))

    @property
    def underlying_cache(self) -> MultiSequenceCache:
        """The child that `set_layer_type` chose."""
        return self._children[self._type]

    def __runs_on__(self) -> tuple[Target, Any]:
        return self._children[0].__runs_on__()

    def _holder(self, layer: int) -> Any:
        number = self._type
        if self._layer_types is not None:
            number = self._layer_types[check_index("layer", layer, len(self._layer_types))]
        return self._children[number]._holder(layer)

    def _every(self) -> tuple[MultiSequenceCache, ...]:
        return (self, *(cache for child in self._children for cache in child._every()))

    def _started(self) -> None:
        self._type = 0
        for child in self._children:
            child._started()

    def _holders(self) -> Sequence[WithRows]:
        return tuple(of for child in self._children for of in child._holders())

    def __repr__(self) -> str:
        parts = [repr(child) for child in self._children]
        if self._layer_types is not None:
            parts.append(f"layer_types={self._layer_types}")
        return f"WrapperCache({', '.join(parts)})"

    # -- what they are

    def _each(self, of: Callable[[Any], Any]) -> tuple[Any, ...]:
        self._check_ready()
        return tuple(of(child) for child in self._children)

    @property
    def layers(self) -> dict[int, LayerSpec]:
        """The description of each layer that was put, by number, in whichever child."""
        return {
            layer: of
            for layers in self._each(lambda child: child.layers)
            for layer, of in layers.items()
        }

    @property
    def target(self) -> str:
        """Name of the target."""
        return str(self._each(lambda child: child.target)[0])

    @property
    def nbytes(self) -> int:
        """Bytes of the K and V buffers of all layers so far, scales included."""
        return sum(self._each(lambda child: child.nbytes))

    @property
    def sequences(self) -> tuple[Any, ...]:
        """Known sequences of each child."""
        return self._each(lambda child: child.sequences)

    def positions(self, seq: int) -> tuple[Any, ...]:
        """Positions of a sequence that each child stores.

        Parameters
        ----------
        seq : int
            The sequence.

        Returns
        -------
        tuple of int32 array (n,)
            In order; empty where the sequence is not known, and of an `EncoderCache`.

        Raises
        ------
        IndexError
            If `seq` is outside ``[0, 2**63)``.
        """
        return self._each(lambda child: child.positions(seq))

    # -- its life

    def _copied(self, access: Access) -> Self:
        new = object.__new__(type(self))
        new.__dict__.update(self.__dict__)
        new._access = access
        new._children = tuple(child._copied(access) for child in self._children)
        return new

    def __snapshot__(self) -> Snapshot:
        """See `numkv.snapshots.snapshot`."""
        self._check_ready()
        children: Any = self._children
        each: list[Snapshot] = [child.__snapshot__() for child in children]
        caches = [
            {"class": type(child).__name__} | x.saved.entries()
            for child, x in zip(self._children, each, strict=True)
        ]
        saved = SavedWrapper(layer_types=self._layer_types, layer_type=self._type, caches=caches)
        tensors = [y for i, x in enumerate(each) for y in x.all_tensors(f"{i}.")]
        return Snapshot(saved, tensors, [(self, True), *(y for x in each for y in x.held)])

    @classmethod
    def __restore__(cls, saved: SavedWrapper, source: Source, options: Options) -> Self:
        """See `numkv.snapshots.snapshot`."""
        shifts = options.shift
        if not isinstance(shifts, (list, tuple)):  # one for all
            shifts = [shifts] * len(saved.caches)
        if len(shifts) != len(saved.caches):
            raise NotSupported(
                f"`shift`: expected one for all, or one for each of the {len(saved.caches)} caches in the file, got "
                f"{len(shifts)}"
            )
        children = [
            of.__restore__(child, Under(source, f"{i}."), options._replace(shift=shift))
            for i, ((of, child), shift) in enumerate(zip(saved.caches, shifts, strict=True))
        ]
        made = cls(*children, layer_types=saved.layer_types)
        made._state, made._type = "ready", saved.layer_type
        made._config = children[0]._config
        return made

    def _pickled(self) -> dict[str, Any]:
        children = [(type(child), child._pickled()) for child in self._children]
        return self.__dict__ | {"_children": children}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        made = []
        for cls, of_child in state["_children"]:
            child = object.__new__(cls)
            child.__setstate__(of_child)
            made.append(child)
        self._children = tuple(made)
        self._share()
