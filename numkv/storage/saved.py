"""Rows and blocks as tensors of a snapshot: their places in buffers, for writing and for reading.

A file has the rows of a layer's tokens in order, by kv head, as they are stored, wherever they are in the cache.
``k.<layer>`` and ``v.<layer>`` are ``(num_kv_heads, tokens, words)``, their scales ``k_scale.<layer>`` and
``v_scale.<layer>``. Slots without a token are not saved. Blocks are saved whole, with zeros past their tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numkv.kinds import Kind
from numkv.snapshots.fields import claims, expect
from numkv.snapshots.regions import Blocks, Ints, Rows, checked
from numkv.snapshots.saved import Spec, entry
from numkv.snapshots.snapshot import Read, Tensor
from numkv.storage.buffer import Buffer, are_scales
from numkv.storage.hadamard import Rotation
from numkv.storage.latents import LATENT
from numkv.storage.pool import Pool
from numkv.targets.base import Array, Target

#: Side, kind and elements of the rows of a buffer.
Side = tuple[str, Kind, int]

_NOT_FINITE = "expected finite scales, got NaN or infinity"
_UNCHECKED = "of rows that were stored with check_finite=False"

# -- entries of headers


def v_storage() -> Any:
    """How V is stored: the name of a kind, or ``"latent"``."""
    return entry(lambda f, name, x: LATENT if f.text(name) == LATENT else f.kind(name).name)


def rotation() -> Any:
    """The seed that rows are rotated by, or None; it has to be the one that caches have."""

    def read(fields: Any, name: str, _: Any) -> int | None:
        seed: int | None = fields.optional(name)
        expect(seed is None or seed == Rotation(1).seed, f"rows are rotated by seed {seed}")
        return seed

    return entry(read)


def seed_of(pool: Pool) -> int | None:
    """Return the seed of a pool's rotation, which `rotation` reads; None without rotation."""
    return None if pool.k_rotation is None else pool.k_rotation.seed


# -- which tensors


def row_specs(
    sides: Sequence[Side], layer: int, heads: int, tokens: int, prefix: str = ""
) -> dict[str, Spec]:
    """The tensors of a layer's rows; names may have something before."""
    specs = {}
    for side, kind, dim in sides:
        with claims(f"a row of {dim} elements"):
            words = kind.words_per_row(dim)
        specs[f"{prefix}{side}.{layer}"] = Spec(kind.word, (heads, tokens, words))
        if kind.is_scaled:
            shape = kind.scale_shape((1, heads, kind.whole_groups(tokens)), dim)
            shape = shape if kind.scales_per == "head" else shape[1:]
            specs[f"{prefix}{side}_scale.{layer}"] = Spec(kind.scale_word, shape)
    return specs


def row_bytes(sides: Sequence[Side], heads: int) -> int:
    """Bytes of a token in a layer."""
    with claims("rows"):
        return sum(kind.row_bytes(dim) * heads for _, kind, dim in sides)


def row_tensors(
    pool: Pool, layer: int, slots: Ints, prefix: str = "",
    set_scales: Callable[[str, Buffer, Any], None] | None = None, v_slots: Ints | None = None,
) -> list[Tensor]:  # fmt: skip
    """Return the rows of a layer's K and V, and their scales; their specs are those of `row_specs`.

    Parameters
    ----------
    pool : Pool
        Its buffers.
    layer : int
        The layer.
    slots : int64 array (n,)
        Where its rows lie.
    prefix : str
        What names begin with.
    set_scales : function, optional
        Takes scales of heads that have been read, with their side and buffer; without it the buffer gets them.
    v_slots : int64 array (n,), optional
        Where rows of V lie, if there are others of these.
    """
    found = []
    of_k = slots
    for side, buffer in pool.stored:
        slots = of_k if side == "k" or v_slots is None else v_slots
        kind, heads = buffer.kind, int(buffer.words.shape[1])
        of_words, *of_scales = row_specs(
            [(side, kind, buffer.dim)], layer, heads, len(slots), prefix
        ).items()
        rows = Rows(pool.target, buffer.words, slots)
        found.append(Tensor(*of_words, rows.pieces, rows.fill))
        for name, spec in of_scales:
            if kind.scales_per == "head":
                found.append(head_scales_tensor(name, side, buffer, set_scales))
                continue
            some = max(1, kind.group_tokens)
            rows = Rows(pool.target, buffer.scales, slots[::some] // some)
            bad = f"{_NOT_FINITE} in {prefix}{side}_scale of layer {layer}, {_UNCHECKED}; drop these tokens"
            tensor = Tensor(name, spec, rows.pieces, rows.fill)
            found.append(checked(tensor, partial(are_scales, kind), bad))
    return found


def head_scales_tensor(
    name: str, side: str, buffer: Buffer, set_scales: Callable[[str, Buffer, Any], None] | None = None
) -> Tensor:  # fmt: skip
    """Return the scales of a layer's heads; see `row_tensors`."""

    def pieces() -> list[NDArray[Any]]:
        return [np.array(buffer.target.to_host(buffer.scales))]

    def fill(read: Read) -> None:
        found = np.empty(tuple(buffer.scales.shape), buffer.kind.scale_word)
        read([found])
        if set_scales is None:
            buffer.scales[:] = buffer.target.asarray(found)
        else:
            set_scales(side, buffer, found)

    spec = Spec(buffer.kind.scale_word, tuple(map(int, buffer.scales.shape)))
    bad = f"{_NOT_FINITE} in {name}"
    return checked(Tensor(name, spec, pieces, fill), partial(are_scales, buffer.kind), bad)


def block_tensor(
    target: Target, name: str, x: Array, ids: NDArray[Any], fills: NDArray[Any], scales_of: Kind | None = None,
) -> Tensor:  # fmt: skip
    """Blocks of an array ``(num_blocks, num_kv_heads, block_size, ...)``, whole and once each.

    Parameters
    ----------
    target : Target
        Where it is.
    name : str
        The tensor's.
    x : array
        The array.
    ids : int array (n,)
        The blocks, which rise.
    fills : int array (n,)
        Tokens in each; later slots do not belong to the sequence, and are written as zeros.
    scales_of : Kind, optional
        Whose scales they are, if they are scales.
    """
    blocks = Blocks(target, x, ids, fills)
    shape = (len(ids), *map(int, x.shape[1:]))
    tensor = Tensor(name, Spec(np.dtype(x.dtype), shape), blocks.pieces, blocks.fill)
    if scales_of is None:
        return tensor
    bad = f"{_NOT_FINITE} among those of {name[0]}, {_UNCHECKED}; remove their sequences"
    return checked(tensor, partial(are_scales, scales_of), bad)


def block_tensors(
    pool: Pool, number: int, ids: NDArray[Any], fills: NDArray[Any], prefix: str = ""
) -> list[Tensor]:
    """Blocks of K and V of a pool, and scales that come with tokens; see `block_tensor`, and `block_specs`."""
    found = []
    for side, x in pool.stored:
        found.append(block_tensor(pool.target, f"{prefix}{side}.{number}", x.words, ids, fills))
        if x.kind.has_scales:
            # A truncation may end in a group of tokens whose codes are all that there is: its scales count.
            of_scales = -(-fills // max(1, x.kind.group_tokens))
            name = f"{prefix}{side}_scale.{number}"
            found.append(block_tensor(pool.target, name, x.scales, ids, of_scales, x.kind))
    return found


def block_specs(
    sides: Sequence[Side], number: int, shape: tuple[int, int, int], prefix: str = ""
) -> dict[str, Spec]:
    """The tensors of blocks ``(num_blocks, num_kv_heads, block_size)``."""
    specs = {}
    for side, kind, dim in sides:
        specs[f"{prefix}{side}.{number}"] = Spec(kind.word, (*shape, kind.words_per_row(dim)))
        if kind.has_scales:
            scales = Spec(kind.scale_word, kind.scale_shape(shape, dim))
            specs[f"{prefix}{side}_scale.{number}"] = scales
    return specs
