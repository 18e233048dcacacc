"""Contestants: a cache, the attention over it, and the restoring of its state after a step."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    Cache,
    DynamicCache,
    QuantizedCache,
    StaticCache,
)
from transformers.cache_utils import DynamicLayer, StaticSlidingWindowLayer
from transformers.masking_utils import causal_mask_function

from numkv.bench.rounds import DYNAMIC, FLOOR, STATIC
from numkv.errors import NotSupported
from numkv.torch.tensors import array_of
from numkv.transformers import NumkvCache
from numkv.transformers.layers import NumkvLayer
from numkv.transformers.masks import plan_of_mask

#: Room of caches that reserve it is a multiple of this.
ROOM = 16
#: Variants of `QuantizedCache` by their names on the command line: label, backend and bits.
_QUANTISED: dict[str, tuple[str, str, int | None]] = {
    "fp8": ("fp8", "fp8", None),
    "quanto": ("quanto int4", "quanto", 4),
    "hqq": ("HQQ int8", "hqq", 8),
}
#: Modes of turboquantcpu by their names on the command line.
_TURBOQUANT = {
    "turboquantcpu": "prod",
    **{f"turboquantcpu-{mode}": mode for mode in ("mse", "qjl", "polar")},
}
_WITHOUT = "numkv_bench_without"
_SMALL = 4096
#: A cache that grows with each step is cut back after it has grown by one part in so many.
_GROWTH = 128


@dataclass(frozen=True)
class Kinds:
    """The storage kinds of a `NumkvCache`.

    Attributes
    ----------
    label : str
        Name of the kinds.
    k_kind, v_kind : str
        Storage kinds.
    rotate : bool
        Whether rows are rotated.
    """

    label: str
    k_kind: str
    v_kind: str
    rotate: bool = False


class Contestant:
    """A cache that is filled to some context, and the attention over it.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        The model.
    cache : transformers.Cache
        The cache, empty.
    room : int
        Reserved room in tokens; 0 for a cache without spare room.
    """

    implementation = "sdpa"

    def __init__(self, model: Any, cache: Any, room: int = 0) -> None:
        self.model = model
        self.cache = cache
        self.room = room
        self._kept: list[tuple[Any, dict[str, Any], dict[str, Any]]] = []

    def store(self, layer: int, k: Any, v: Any) -> None:
        """Fill a layer with rows ``(batch, num_kv_heads, context, head_dim)``."""
        self.cache.update(k, v, layer)

    def keep(self) -> None:
        """Record the cache's present state, for `restore`."""
        self._kept = []
        for layer in self.cache.layers:
            held = dict(vars(layer))
            rolls = isinstance(layer, StaticSlidingWindowLayer)  # its rows move in place
            copies = {
                name: x.clone()
                for name, x in held.items()
                if torch.is_tensor(x) and (rolls or x.numel() < _SMALL)
            }
            self._kept.append((layer, held, copies))

    def restore(self, *, exactly: bool = False) -> None:
        """Remove the tokens added since `keep`.

        Parameters
        ----------
        exactly : bool
            Whether to remove them now. If not, a cache may grow a little first, if cutting changes the cost of steps.
        """
        for layer, held, copies in self._kept:
            vars(layer).clear()
            vars(layer).update(held)
            for name, x in copies.items():  # counters, which are changed in place
                held[name].copy_(x)

    def enter(self) -> None:
        """Set the model's attention to this contestant's."""
        self.model.set_attn_implementation(self.implementation)

    def leave(self) -> None:
        """Undo `enter`, if the next contestant's `enter` does not."""

    @property
    def nbytes(self) -> int:
        """Return the bytes of K and V, scales and spare room included."""
        return sum(sum(map(_nbytes, vars(layer).values())) for layer in self.cache.layers)

    def read_by_step(self, context: int) -> int:
        """Return the bytes that a step reads: those of the tokens, without spare room."""
        return self.nbytes * context // max(self.room, context)


def _nbytes(x: Any) -> int:
    if hasattr(x, "__tensor_flatten__"):
        return sum(_nbytes(getattr(x, name)) for name in x.__tensor_flatten__()[0])
    if torch.is_tensor(x):
        return int(x.numel() * x.element_size())
    if isinstance(x, dict):
        return sum(map(_nbytes, x.values()))
    return sum(map(_nbytes, x)) if isinstance(x, (tuple, list)) else 0


class _Dynamic(Contestant):
    """DynamicCache: each step copies all rows into new memory, whose pages the system may have to map.

    The cache grows and is rarely cut back, so that this costs as much as in text generation.
    """

    def restore(self, *, exactly: bool = False) -> None:
        context = int(self._kept[0][1]["keys"].shape[2])
        grown = int(self.cache.get_seq_length()) - context
        if not exactly and grown <= context // _GROWTH:
            return
        self.cache.crop(-grown)
        for layer in self.cache.layers:
            layer.keys, layer.values = layer.keys.contiguous(), layer.values.contiguous()

    def keep(self) -> None:
        super().keep()
        for _, held, _ in self._kept:  # only their number, so that no memory is kept
            held["keys"] = held["values"] = held["keys"].to("meta")


class _Numkv(Contestant):
    implementation = "numkv"

    def __init__(self, model: Any, cache: Any, room: int = 0) -> None:
        super().__init__(model, cache, room)
        self._plan: Any = None

    def store(self, layer: int, k: Any, v: Any) -> None:
        batch, _, tokens, _ = k.shape
        # One plan for all layers, as in a forward pass. With different plans, every later step would compute metadata
        # for each layer, which a model's layers share.
        if self._plan is None:
            self._plan = plan_of_mask(batch, tokens, tokens, mask_function=causal_mask_function)
        _store(self.cache.layers[layer], k, v, self._plan)

    def keep(self) -> None:
        super().keep()
        self._plan = None
        layer = self.cache.layers[0]
        self.room = layer.pool.k.shape[0] * layer.block_size // layer.metadata.batch

    def restore(self, *, exactly: bool = False) -> None:
        if any(self.cache.is_sliding):  # sliding layers would have to store more tokens for a crop
            super().restore(exactly=exactly)
        else:
            self.cache.crop(int(self._kept[0][1]["metadata"].columns - self.cache.get_seq_length()))

    @property
    def nbytes(self) -> int:
        return int(self.cache.nbytes)


def _store(layer: NumkvLayer, k: Any, v: Any, plan: Any) -> None:
    """Store new rows as a forward pass does, without queries."""
    layer.begin(k, v)
    step = plan.step(layer)
    rows = (
        array_of(x.transpose(1, 2).reshape(-1, x.shape[1], x.shape[3]), name)
        for name, x in (("k", k), ("v", v))
    )
    layer.pool.scatter(*layer.pool.check_rows(*rows, check_finite=True), step.slots)
    layer.change(step.after, step.shrink)


class _NothingStored(Cache):  # type: ignore[misc]
    """A cache of a given length that stores no rows."""

    def __init__(self, config: Any) -> None:
        super().__init__(layers=DynamicCache(config=config).layers)
        self.columns = 0

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        return key_states, value_states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.columns

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.columns + query_length, 0


class _Floor(Contestant):
    """The model without attention and its cache."""

    implementation = _WITHOUT

    def store(self, layer: int, k: Any, v: Any) -> None:
        self.cache.columns = int(k.shape[2])


class _TurboQuantCpu(Contestant):
    """turboquantcpu: the package stores compressed copies in addition to the model's own cache.

    `base` is the model's own cache, which all modes share here.
    """

    def __init__(self, model: Any, base: Contestant, mode: str, context: int) -> None:
        super().__init__(model, base.cache)
        self.base = base
        package = importlib.import_module("turboquantcpu")
        self.compressed = package.patch_model(
            model, mode=mode, bits=4, max_seq_len=context + ROOM, verbose=False
        )
        self._patched = [(module, module.forward) for module, _ in model._tqcpu_wrapped]
        package.unpatch_model(model)
        self.leave()
        self._states: list[Any] = []

    def store(self, layer: int, k: Any, v: Any) -> None:
        if self.cache.layers[layer].get_seq_length() == 0:
            self.base.store(layer, k, v)
        rows = (x[0].permute(1, 0, 2).contiguous() for x in (k, v))
        self.compressed.update(layer, *rows)

    def keep(self) -> None:
        self.base.keep()
        self._states = [dict(vars(self.compressed[i])) for i in range(len(self.compressed))]

    def restore(self, *, exactly: bool = False) -> None:
        self.base.restore(exactly=exactly)
        for i, state in enumerate(self._states):
            vars(self.compressed[i]).update(state)

    def enter(self) -> None:
        super().enter()
        for module, forward in self._patched:
            module.forward = forward

    def leave(self) -> None:
        for module, _ in self._patched:
            module.__dict__.pop("forward", None)

    def read_by_step(self, context: int) -> int:
        return self.base.read_by_step(context)

    @property
    def nbytes(self) -> int:
        compressed = sum(self.compressed[i].memory_bytes() for i in range(len(self.compressed)))
        return self.base.nbytes + int(compressed)


def _dynamic(model: Any) -> Contestant:
    cache = DynamicCache(config=model.config)
    plain = all(type(layer) is DynamicLayer for layer in cache.layers)
    return (_Dynamic if plain else Contestant)(model, cache)


# -------------------------------------------------------------------- attention left out


def _without(module: Any, query: Any, *others: Any, **more: Any) -> tuple[Any, None]:
    found = getattr(module, "_numkv_bench_queries", None)
    if found is not None:
        scale = more.get("scaling")
        scale = query.shape[-1] ** -0.5 if scale is None else float(scale)
        norm = float(query.float().square().sum(-1).mean().sqrt())
        found.append(scale * norm)
    dim = others[1].shape[-1]
    return query.transpose(1, 2)[..., :dim].contiguous(), None


def _no_mask(*args: Any, **kwargs: Any) -> None:
    return None


AttentionInterface.register(_WITHOUT, _without)
AttentionMaskInterface.register(_WITHOUT, _no_mask)


def queries_of(model: Any, ids: Any) -> list[float]:
    """Return for each layer the spread of scores over keys of independent standard normal numbers.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        The model.
    ids : int64 tensor (batch, tokens)
        Its input.
    """
    found: list[float] = []
    modules = [m for m in model.modules() if hasattr(m, "layer_idx")]
    for module in modules:
        module._numkv_bench_queries = found
    try:
        model.set_attn_implementation(_WITHOUT)
        with torch.no_grad():
            model(input_ids=ids, use_cache=False)
    finally:
        for module in modules:
            del module._numkv_bench_queries
    return found


# -------------------------------------------------------------------- all of them


def candidates(
    wanted: list[str], kinds: list[Kinds], model: Any, context: int, room: int
) -> Iterator[tuple[str, Callable[[], Contestant]]]:
    """Yield the name and the factory of each contestant; a factory raises an error if a package is missing.

    Parameters
    ----------
    wanted : list of str
        See `numkv.cli.bench.CONTESTANTS`.
    kinds : list of Kinds
        Storage kinds of numkv.
    model : transformers.PreTrainedModel
        The model.
    context : int
        Tokens in the caches before a step.
    room : int
        Reserved room in tokens, for caches that reserve it.
    """
    config = model.config
    if "dynamic" in wanted:
        yield DYNAMIC, lambda: _dynamic(model)
    if "static" in wanted:
        yield (
            STATIC,
            lambda: Contestant(model, StaticCache(config=config, max_cache_len=room), room),
        )
    if "numkv" in wanted:
        for one in kinds:

            def numkv(one: Kinds = one) -> Contestant:
                cache = NumkvCache(
                    config, k_kind=one.k_kind, v_kind=one.v_kind, capacity=room, rotate=one.rotate
                )
                return _Numkv(model, cache, room)

            yield f"numkv {one.label}", numkv
    for asked, (name, backend, bits) in _QUANTISED.items():
        if asked in wanted:

            def quantised(backend: str = backend, bits: int | None = bits) -> Contestant:
                return Contestant(model, QuantizedCache(backend, config, nbits=bits))

            yield f"QuantizedCache {name} + SDPA", quantised
    shared: list[Contestant] = []
    for asked, mode in _TURBOQUANT.items():
        if asked in wanted:

            def turboquant(mode: str = mode) -> Contestant:
                if importlib.util.find_spec("turboquantcpu") is None:
                    raise NotSupported("not installed; pip install turboquantcpu")
                if not shared:
                    shared.append(_dynamic(model))
                return _TurboQuantCpu(model, shared[0], mode, context)

            yield f"turboquantcpu {mode}", turboquant
    if "floor" in wanted:
        yield FLOOR, lambda: _Floor(model, _NothingStored(config))
