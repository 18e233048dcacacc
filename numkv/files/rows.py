"""Rows of caches in files: which tensors they are, and how they get there and back.

A file has the rows of a layer's tokens one after another, by kv head, as they are stored, wherever they lie in the
cache: ``k.<layer>`` and ``v.<layer>`` are ``(num_kv_heads, tokens, words)``, their scales ``k_scale.<layer>`` and
``v_scale.<layer>``. Slots without a token are not in the file.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numkv.errors import NumkvError
from numkv.files.container import Container
from numkv.files.plan import tensor_of
from numkv.kinds import Kind
from numkv.snapshots.fields import claims, expect
from numkv.snapshots.snapshot import Spec, Tensor
from numkv.storage.buffer import Buffer, are_scales
from numkv.storage.pool import Pool
from numkv.targets.base import Target

Slots = NDArray[np.int64]

# Runs of rows that are shorter than this are copied together first, as many bytes at a time.
_SHORT_RUN = 16 << 10
_STAGED = 4 << 20


def slots_in(blocks: Any, size: int, begin: int, end: int) -> Slots:
    """The slots of tokens ``[begin, end)`` of a sequence whose blocks of `size` tokens are these."""
    at = np.arange(begin, end, dtype=np.int64)
    return np.asarray(blocks, np.int64)[at // size] * size + at % size if size else at


# -- which tensors


def row_specs(
    side: str, place: str, kind: Kind, dim: int, heads: int, tokens: int
) -> dict[str, Spec]:
    """The tensors of the K rows, or V rows, of a layer.

    Parameters
    ----------
    side : {"k", "v"}
        Which; names may have something before.
    place : str
        Number of the layer, after the dot.
    kind : Kind
        How they are stored.
    dim : int
        Elements of a row.
    heads, tokens : int
        Kv heads and tokens.
    """
    with claims(f"a row of {dim} elements"):
        specs = {f"{side}.{place}": Spec(kind.word, (heads, tokens, kind.words_per_row(dim)))}
    if kind.is_scaled:
        shape = kind.scale_shape((1, heads, tokens), dim)
        shape = shape if kind.scales_per == "head" else shape[1:]
        specs[f"{side}_scale.{place}"] = Spec(kind.scale_word, shape)
    return specs


def row_bytes(kinds: tuple[Kind, ...], dims: tuple[int, ...], heads: int) -> int:
    """Bytes of a token in a layer."""
    with claims("rows"):
        return sum(kind.row_bytes(dim) * heads for kind, dim in zip(kinds, dims, strict=True))


def row_tensors(
    side: str, place: str, arrays: Callable[[], tuple[Any, Any]], kind: Kind, dim: int, heads: int,
    slots: Slots,
) -> list[Tensor]:  # fmt: skip
    """Tensors of the rows in some slots; their specs are those of `row_specs`.

    Parameters
    ----------
    side, place, kind, dim, heads
        See `row_specs`.
    arrays : callable
        Gives the words and the scales of the buffer in host memory, when they are needed.
    slots : int64 array (n,)
        Where the rows lie in it.
    """
    specs = row_specs(side, place, kind, dim, heads, len(slots))

    def words() -> Iterator[NDArray[Any]]:
        return _pieces(arrays()[0], slots)

    def scales() -> Iterator[NDArray[Any]]:
        found = arrays()[1]
        for piece in [found] if kind.scales_per == "head" else _pieces(found, slots):
            if not are_scales(kind, piece):
                raise NumkvError(
                    f"`cache`: expected finite scales, got NaN or infinity in {side}_scale of layer {place}, of rows "
                    "that were stored with check_finite=False; drop these tokens"
                )
            yield piece

    parts = (words, scales)[: len(specs)]
    return [
        tensor_of(name, *spec, part)
        for (name, spec), part in zip(specs.items(), parts, strict=True)
    ]


def tensors_of_pool(
    prefix: str, layer: int, pool: Pool, slots: Slots, block: int | None = None
) -> list[Tensor]:
    """Tensors of the K and V rows of a layer.

    Parameters
    ----------
    prefix : str
        What names begin with.
    layer : int
        The layer.
    pool : Pool
        Its buffers.
    slots : int64 array (n,)
        Where its rows lie.
    block : int, optional
        The only block that they lie in; then slots are counted from its first one.
    """
    found = []
    part = slice(None) if block is None else slice(block, block + 1)
    for side, buffer in pool.stored:

        def arrays(buffer: Buffer = buffer) -> tuple[Any, Any]:
            scales = buffer.scales[part] if buffer.kind.has_scales else buffer.scales
            to_host = pool.target.to_host
            return to_host(buffer.words[part]), to_host(scales)

        heads = int(buffer.words.shape[1])
        name = f"{prefix}{side}"
        found += row_tensors(name, str(layer), arrays, buffer.kind, buffer.dim, heads, slots)
    return found


# -- how they get there and back


def _by_row(x: NDArray[Any]) -> NDArray[Any]:
    """An array of rows, also where a row has one element."""
    return x if x.ndim == 4 else x[..., None]


def _runs(slots: Slots, size: int) -> list[tuple[int, int, int]]:
    """Slots as runs of neighbours in one block: block, offset, length."""
    if not len(slots):
        return []
    breaks = np.flatnonzero((np.diff(slots) != 1) | (slots[1:] % size == 0)) + 1
    bounds = np.concatenate([[0], breaks, [len(slots)]])
    firsts = slots[bounds[:-1]]
    return list(
        zip(
            (firsts // size).tolist(),
            (firsts % size).tolist(),
            np.diff(bounds).tolist(),
            strict=True,
        )
    )


def _is_short(x: NDArray[Any], slots: Slots, runs: list[tuple[int, int, int]]) -> bool:
    return len(slots) * x.shape[3] * x.itemsize < _SHORT_RUN * len(runs) and len(runs) > 1


def _steps(x: NDArray[Any], slots: Slots) -> Iterator[tuple[Slots, Slots]]:
    """Blocks and offsets of slots, of not too many at a time."""
    size, most = x.shape[2], max(1, _STAGED // max(1, x.shape[3] * x.itemsize))
    for i in range(0, len(slots), most):
        part = slots[i : i + most]
        yield part // size, part % size


def _pieces(x: NDArray[Any], slots: Slots) -> Iterator[NDArray[Any]]:
    """The rows in some slots of an array ``(num_blocks, num_kv_heads, block_size, …)``, head by head."""
    x = _by_row(x)
    runs = _runs(slots, max(1, x.shape[2]))
    short = _is_short(x, slots, runs)
    for head in range(x.shape[1]):
        if short:
            for blocks, offsets in _steps(x, slots):
                yield x[blocks, head, offsets]
        else:
            for block, offset, n in runs:
                yield x[block, head, offset : offset + n]


def _fill(file: Container, name: str, x: NDArray[Any], slots: Slots) -> None:
    """Read rows into some slots, head by head."""
    x = _by_row(x)
    runs = _runs(slots, max(1, x.shape[2]))
    short = _is_short(x, slots, runs)
    for head in range(x.shape[1]):
        if short:
            for blocks, offsets in _steps(x, slots):
                rows = np.empty((len(blocks), x.shape[3]), x.dtype)
                file.fill(name, [rows])
                x[blocks, head, offsets] = rows
        else:
            file.fill(name, [x[block, head, offset : offset + n] for block, offset, n in runs])


def fill_rows(
    file: Container, side: str, place: str, kind: Kind, arrays: Any, slots: Slots
) -> None:
    """Read the rows of a layer into some slots of its buffers; see `row_tensors`.

    Parameters
    ----------
    file : Container
        From where.
    side, place : str
        See `row_specs`.
    kind : Kind
        How they are stored.
    arrays : tuple of array
        Words and scales, in host memory; scales of heads are read by `read_head_scales`.
    slots : int64 array (n,)
        Where they go.

    Raises
    ------
    Damaged
        If scales are not finite, or negative.
    """
    words, scales = arrays
    _fill(file, f"{side}.{place}", words, slots)
    if kind.has_scales:
        name = f"{side}_scale.{place}"
        _fill(file, name, scales, slots)
        for piece in _pieces(scales, slots):
            check_scales(name, kind, piece)


def fill_pool(
    file: Container, prefix: str, layer: int, pool: Pool, slots: Slots, host: HostBuffers
) -> None:
    """Read the rows of a layer into some slots of a pool; see `tensors_of_pool`."""
    for side, buffer in pool.stored:
        scales = host.of(buffer.scales) if buffer.kind.has_scales else None
        arrays = host.of(buffer.words), scales
        fill_rows(file, f"{prefix}{side}", str(layer), buffer.kind, arrays, slots)


def read_head_scales(file: Container, side: str, place: str, kind: Kind) -> NDArray[Any] | None:
    """The scales of a layer's heads, or None of a kind that has no such scales."""
    if kind.scales_per != "head":
        return None
    name = f"{side}_scale.{place}"
    scales = file.array(name)
    check_scales(name, kind, scales)
    return scales


def check_scales(name: str, kind: Kind, words: NDArray[Any]) -> None:
    """Refuse scales of a file that are none."""
    expect(are_scales(kind, words), f"{name!r} holds NaN, infinity or a negative number")


class HostBuffers:
    """Buffers in host memory that are to be filled: the target's own on the CPU, else ones that it gets in the end."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._twins: dict[int, tuple[Any, NDArray[Any]]] = {}

    def of(self, x: Any) -> NDArray[Any]:
        """An array of the target in host memory, of zeros where that is elsewhere."""
        if self._target.values_on_host:
            return np.asarray(x)
        if id(x) not in self._twins:
            self._twins[id(x)] = x, np.zeros(tuple(x.shape), x.dtype)
        return self._twins[id(x)][1]

    def upload(self) -> None:
        """Copy what has been filled to the target."""
        for x, twin in self._twins.values():
            if x.size:
                words: Any = self._target.words(x)  # Numba copies no dtypes of ml_dtypes
                words.copy_to_device(twin.view(words.dtype))
        self._twins.clear()
