"""The state that rebuilds a `NumkvCache`, and `mark_of`: a model's mark, which identifies files of its caches."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from numkv.caches import FullPrecision
from numkv.errors import NotSupported
from numkv.snapshots.fields import claims, expect
from numkv.snapshots.saved import (
    Saved,
    Spec,
    flag,
    integer,
    integers,
    optional,
    part,
    parts,
    storage_kind,
)
from numkv.snapshots.snapshot import Snapshot, Source, Tensor, fill_all
from numkv.storage.saved import block_specs, block_tensors
from numkv.transformers.families import types_of_layers
from numkv.transformers.internals import inner_model
from numkv.transformers.layers import HybridLayer, LatentLayer, NumkvLayer, Options, Shared
from numkv.transformers.metadata import BatchMetadata

_INT32, _UINT8 = np.dtype(np.int32), np.dtype(np.uint8)
# Each weight contributes runs of so many elements from so many places to a mark.
_RUNS, _RUN = 4, 256


@dataclass(kw_only=True)
class SavedOptions(Saved):
    """The options of a layer: `numkv.transformers.layers.Options`."""

    k_kind: Any = storage_kind(optional=True)
    v_kind: Any = storage_kind(optional=True)
    capacity: int = integer()
    rotate: bool = flag()
    window: int = integer()
    num_sink_tokens: int = integer()
    shape: list[int] = integers()

    @classmethod
    def of(cls, options: Options) -> SavedOptions:
        """Return the saved options of a layer."""
        kept = options.full_precision
        return cls(
            k_kind=options.k_kind, v_kind=options.v_kind, capacity=options.capacity, rotate=options.rotate,
            window=0 if kept is None else kept.window, num_sink_tokens=options.num_sink_tokens,
            shape=list(options.shape or ()),
        )  # fmt: skip

    def check(self) -> None:
        """See `Saved.check`."""
        expect(len(self.shape) in (0, 3), "the shape of a profile's layer does not have 3 numbers")
        _ = self.options

    @property
    def options(self) -> Options:
        """Return the checked options as an object."""
        kept = self.window or self.num_sink_tokens
        with claims("options"):
            made = Options(
                None, self.k_kind, self.v_kind, self.capacity, self.rotate,
                FullPrecision(self.window, self.num_sink_tokens) if kept else None,
            )  # fmt: skip
        made.shape = tuple(self.shape) or None
        return made


@dataclass(kw_only=True)
class SavedTokens(Saved):
    """A `BatchMetadata`: the tokens of layers of one history. Its table and its padding are tensors."""

    block_size: int = integer(1)
    blocks: int = integer()
    reach: int = integer(-1)
    columns: int = integer()
    lengths: list[int] = integers()
    first: list[int] = integers()
    width: int = integer()
    padded: bool = flag()
    shared: bool = flag()

    @classmethod
    def of(cls, x: BatchMetadata) -> SavedTokens:
        """Return the saved metadata of layers."""
        return cls(
            block_size=x.block_size, blocks=x.num_blocks, reach=x.reach, columns=x.columns,
            lengths=x.lengths.tolist(), first=x.first.tolist(), width=x.table.shape[1],
            padded=x.valid is not None, shared=x.shared,
        )  # fmt: skip

    def check(self) -> None:
        """See `Saved.check`."""
        expect(len(self.lengths) == len(self.first) > 0, "sequences without lengths")
        for length, first in zip(self.lengths, self.first, strict=True):
            expect(0 <= length <= self.columns, f"{length} tokens in {self.columns} columns")
            expect(self.padded or length == self.columns, "columns that are no tokens, unpadded")
            held = -(-(length - first * self.block_size) // self.block_size)
            expect(0 <= held <= self.width, "a table that is too short")

    def specs_of(self, number: int) -> dict[str, Spec]:
        """Return its tensors."""
        batch = len(self.lengths)
        found = {f"table.{number}": Spec(_INT32, (batch, self.width))}
        if self.padded:
            found[f"valid.{number}"] = Spec(_UINT8, (batch, self.columns))
        return found

    def restored(self, number: int, source: Source) -> BatchMetadata:
        """Return the checked metadata."""
        lengths, first = (np.array(x, np.int64) for x in (self.lengths, self.first))
        table, valid = source.array(f"table.{number}"), None
        if self.padded:
            found = source.array(f"valid.{number}")
            expect(bool((found <= 1).all()), "padding that is neither 0 nor 1")
            valid = found.astype(np.bool_)
            expect(bool((valid.sum(1) == lengths).all()), "lengths that differ from the padding")
        made = BatchMetadata(
            self.block_size, self.blocks, self.reach, self.columns, lengths, first, table, valid, self.shared
        )  # fmt: skip
        live = table[made.held()]
        known = bool(((live >= 0) & (live < self.blocks)).all())
        expect(known, "a table has an invalid block")
        for row, own in zip(table, made.held(), strict=True):
            expect(len(np.unique(row[own])) == own.sum(), "a sequence has a block twice")
        expect(self.shared or len(np.unique(live)) == len(live), "sequences share blocks")
        return made


@dataclass(kw_only=True)
class SavedRows(Saved):
    """The buffers of a layer."""

    tokens: int = integer()
    k_kind: Any = storage_kind()
    v_kind: Any = storage_kind()
    num_kv_heads: int = integer(1)
    head_dim: int = integer(1)
    head_dim_v: int = integer(1)
    newest_k: Any = storage_kind(optional=True)
    newest_v: Any = storage_kind(optional=True)
    newest_from: list[int] = integers()


@dataclass(kw_only=True)
class SavedLayer(Saved):
    """A layer of a `NumkvCache`; without rows before the first pass."""

    latent: bool = flag()
    reach: int = integer(-1)
    record_past: bool = flag()
    options: int = integer()
    rows: SavedRows | None = part(SavedRows, optional=True)


@dataclass(kw_only=True)
class SavedCache(Saved):
    """A `NumkvCache`: layers, with common options and metadata stored once."""

    layout = "transformers"

    options: list[SavedOptions] = parts(SavedOptions)
    tokens: list[SavedTokens] = parts(SavedTokens)
    layers: list[SavedLayer] = parts(SavedLayer)
    max_nbytes: int | None = optional(missing=None)

    def check(self) -> None:
        """See `Saved.check`."""
        expect(bool(self.layers), "there are no layers")
        for number, x in enumerate(self.layers):
            expect(x.options < len(self.options), f"layer {number} has no options")
            options = self.options[x.options].options
            layer = _empty(x, options)
            with claims(f"layer {number}"):
                options.check_layer(number, layer)
            rows = x.rows
            if rows is None:
                continue
            expect(rows.tokens < len(self.tokens), f"layer {number} has no tokens")
            tokens = self.tokens[rows.tokens]
            expect(tokens.reach == x.reach, f"layer {number} has the tokens of another window")
            size = max(layer.block_size, options.group_tokens)
            expect(tokens.block_size == size, f"blocks of {tokens.block_size} in layer {number}")
            for asked, got in ((options.k_kind, rows.k_kind), (options.v_kind, rows.v_kind)):
                as_asked = got.scales_per == "none" if asked is None else got == asked
                expect(as_asked, f"rows in {got} in layer {number}")
            newest = bool(options.group_tokens or options.full_precision)
            ends, found = rows.newest_from, (rows.newest_k, rows.newest_v)
            full = all(of is not None and of.scales_per == "none" for of in found)
            expect(full if newest else found == (None, None), f"newest tokens in layer {number}")
            expect(len(ends) == len(tokens.lengths) * newest, f"newest tokens in layer {number}")
            expect(all(a <= b for a, b in zip(ends, tokens.lengths, strict=False)), "newest tokens")
            shape = options.shape
            same = shape in (None, (rows.num_kv_heads, rows.head_dim, rows.head_dim_v))
            expect(same, f"layer {number} differs from its profile")

    def specs(self) -> dict[str, Spec]:
        """See `Saved.specs`."""
        found: dict[str, Spec] = {}
        for number, tokens in enumerate(self.tokens):
            found |= tokens.specs_of(number)
        for number, x in enumerate(self.layers):
            if x.rows is not None:
                with claims(f"layer {number}"):
                    found |= self._specs_of(number, x.rows, x.latent)
        return found

    def _specs_of(self, number: int, rows: SavedRows, latent: bool) -> dict[str, Spec]:
        """Return the tensors of a layer."""
        tokens, options = self.tokens[rows.tokens], self.options[self.layers[number].options]
        sides = [("k", rows.k_kind, rows.head_dim), ("v", rows.v_kind, rows.head_dim_v)]
        shape = tokens.blocks, rows.num_kv_heads, tokens.block_size
        found = block_specs(sides[: 2 - latent], number, shape)
        if rows.newest_k is not None:
            blocks, size = options.options.in_full
            sides = [("k", rows.newest_k, rows.head_dim), ("v", rows.newest_v, rows.head_dim_v)]
            shape = blocks * len(tokens.lengths), rows.num_kv_heads, size
            found |= block_specs(sides, number, shape, "newest_")
        return found

    @property
    def nbytes(self) -> int:
        """See `Saved.nbytes`."""
        return sum(spec.nbytes for spec in self.specs().values())

    def restored(self, source: Source) -> list[NumkvLayer]:
        """Return the layers, with their tokens."""
        shared, options = Shared(self.max_nbytes), [x.options for x in self.options]
        for each in options:
            each.shared = shared
        tokens = [x.restored(number, source) for number, x in enumerate(self.tokens)]
        layers = []
        for number, x in enumerate(self.layers):
            layer = _empty(x, options[x.options])
            rows = x.rows
            if rows is not None:
                held = tokens[rows.tokens]
                with claims(f"layer {number}"):
                    layer.allocate(
                        held.batch, held.num_blocks, (rows.num_kv_heads, rows.head_dim, rows.head_dim_v),
                        (rows.k_kind, rows.v_kind), (rows.newest_k, rows.newest_v),
                    )  # fmt: skip
                layer.change(held)
                if layer.ring is not None:
                    layer.ring.end = np.array(rows.newest_from, np.int64)
                fill_all(source, _tensors(number, layer, np.arange(held.num_blocks)))
            layers.append(layer)
        return layers


def _empty(x: SavedLayer, options: Options) -> NumkvLayer:
    """Return a new layer without rows."""
    layer = (LatentLayer if x.latent else NumkvLayer)(options, x.reach)
    layer.record_past = x.record_past
    return layer


def _tensors(number: int, layer: NumkvLayer, blocks: NDArray[Any]) -> list[Tensor]:
    """Return the tensors of a layer's blocks."""
    found = block_tensors(layer.pool, number, blocks, layer.metadata.fills()[blocks])
    if layer.ring is not None:
        newest = layer.ring.pool
        count, _, size, _ = map(int, newest.k.shape)
        found += block_tensors(newest, number, np.arange(count), np.full(count, size), "newest_")
    return found


def snapshot(layers: Sequence[Any], held: Any) -> Snapshot:
    """Return the snapshot of a cache.

    Parameters
    ----------
    layers : sequence
        Layers of a `NumkvCache`.
    held : object
        The cache, which must not change meanwhile.

    Raises
    ------
    NotSupported
        If layers are transformers' own.
    """
    options: dict[Options, int] = {}
    tokens: dict[BatchMetadata, int] = {}
    saved_layers, tensors = [], list[Tensor]()
    for number, layer in enumerate(layers):
        if not isinstance(layer, NumkvLayer) or isinstance(layer, HybridLayer):
            raise NotSupported(
                f"`cache`: expected layers of attention, got {type(layer).__name__} as layer {number}, whose states "
                "are transformers' own; pickle this cache"
            )
        rows, at, pool = None, layer.metadata, layer.pool
        if at is not None and pool is not None:
            _, (_, blocks, _) = at.packed()
            newest = None if layer.ring is None else layer.ring.pool
            rows = SavedRows(
                tokens=tokens.setdefault(at, len(tokens)), k_kind=pool.k_kind, v_kind=pool.v_kind,
                num_kv_heads=int(pool.k.shape[1]), head_dim=pool.head_dim, head_dim_v=pool.head_dim_v,
                newest_k=None if newest is None else newest.k_kind, newest_v=None if newest is None else newest.v_kind,
                newest_from=[] if layer.ring is None else layer.ring.end.tolist(),
            )  # fmt: skip
            tensors += _tensors(number, layer, blocks)
        saved_layers.append(
            SavedLayer(
                latent=isinstance(layer, LatentLayer), reach=layer.reach, record_past=layer.record_past,
                options=options.setdefault(layer.options, len(options)), rows=rows,
            )
        )  # fmt: skip
    arrays = {}
    for at, number in tokens.items():
        less, _ = at.packed()
        arrays[f"table.{number}"] = np.ascontiguousarray(less.table, np.int32)
        if less.valid is not None:
            arrays[f"valid.{number}"] = less.valid.astype(np.uint8)
    saved = SavedCache(
        options=[SavedOptions.of(x) for x in options],
        tokens=[SavedTokens.of(at.packed()[0]) for at in tokens], layers=saved_layers, max_nbytes=held.max_nbytes,
    )  # fmt: skip
    return Snapshot(saved, tensors, [(held, True)], arrays)


def mark_of(model: Any) -> dict[str, str | int | float | None]:
    """Make the mark of a model, by which `numkv.load` and a `PrefixStore` recognise its K and V.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        The model, or a wrapper of one, on the CPU.

    Returns
    -------
    dict
        Its type, its layers, a digest of its RoPE, its dtype, and a digest of some rows of each of its weights, those
        of adapters included. Add entries for everything else that decides K and V.

    Raises
    ------
    NotSupported
        If weights are not in memory.
    TypeError
        If it is no model.

    Examples
    --------
    >>> import transformers
    >>> from numkv.transformers import mark_of
    >>> config = transformers.LlamaConfig(
    ...     vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4)
    >>> mark_of(transformers.LlamaForCausalLM(config))["layers"]
    '2 full_attention'
    """
    inner = inner_model(model)
    config = inner.config.get_text_config(decoder=True)
    kinds = Counter(
        " ".join([name, *(f"{x}={given[x]}" for x in sorted(given))])
        for name, given in types_of_layers(config, "mark_of")
    )
    rope = json.dumps(getattr(config, "rope_parameters", None), sort_keys=True, default=str)
    found = hashlib.blake2b(digest_size=16)
    for name, weight in inner.named_parameters():
        if weight.device.type == "meta":
            raise NotSupported(
                f"mark_of: expected weights in memory, got {name!r} elsewhere; load the model without offloading"
            )
        found.update(f"{name} {tuple(weight.shape)} {weight.dtype}".encode())
        flat = weight.detach().reshape(-1)
        for i in range(_RUNS):
            begin = i * max(0, len(flat) - _RUN) // (_RUNS - 1)
            run = flat[begin : begin + _RUN].contiguous().view(torch.uint8)
            found.update(run.cpu().numpy().tobytes())
    return {
        "model": config.model_type,
        "layers": ", ".join(f"{n} {name}" for name, n in kinds.items()),
        "rope": hashlib.blake2b(rope.encode(), digest_size=8).hexdigest(),
        "dtype": str(inner.dtype).removeprefix("torch."),
        "weights": found.hexdigest(),
    }
