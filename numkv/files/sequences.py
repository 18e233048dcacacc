"""Sequences in files, as `PagedKVCache.swap_out` gives them and `swap_in` takes them.

One file holds any number of `SwappedSequence` of one geometry. Tensor names are ``<sequence>.<what>``, with a number of
a layer or of a group behind that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numkv.caches.paged.swap import Geometry, SwappedSequence, check_sequence
from numkv.errors import NumkvError
from numkv.files.container import Container
from numkv.files.plan import Saved, tensor_of
from numkv.snapshots.fields import MOST, Fields, claims, expect
from numkv.snapshots.snapshot import Spec, Tensor

_BUFFERS = ("k", "v", "k_scale", "v_scale")
_HEAD_SCALES = ("k_head_scale", "v_head_scale")  # of kinds whose heads have scales, by layer
_NO_BLOCKS = (0, 0, 0)  # shape of scales that there are none of, or that are not of blocks


# -- saving


def describe(sequences: Any) -> Saved:
    """What sequences are in a file.

    Parameters
    ----------
    sequences : sequence of SwappedSequence
        One or more, of one geometry.

    Returns
    -------
    Saved

    Raises
    ------
    NumkvError, TypeError, ValueError
        If there are none, they do not have one geometry, or one contradicts itself.
    """
    found = list(sequences) if isinstance(sequences, Sequence) else [sequences]
    for sequence in found:
        if not isinstance(sequence, SwappedSequence):
            raise TypeError(
                f"`sequences`: expected what PagedKVCache.swap_out gives, got {type(sequence).__name__}"
            )
    if not found or any(x.geometry != found[0].geometry for x in found):
        raise NumkvError(
            "`sequences`: expected one or more of the same geometry, got "
            f"{[x.geometry for x in found]}"
        )
    tensors: list[Tensor] = []
    for i, sequence in enumerate(found):
        check_sequence(sequence)
        tensors += _tensors(f"{i}.", sequence)
    fields = {
        "layout": "paged",
        "geometry": found[0].geometry,
        "sequences": [
            {
                "length": int(x.length),
                "tokens": len(x.tokens),
                "extra": packed(x.extra),
                "starts": x.starts,
                "blocks": [len(logical) for logical in x.logical],
            }
            for x in found
        ],
    }
    return Saved(fields, tensors, [])


def _tensors(prefix: str, sequence: SwappedSequence) -> list[Tensor]:
    geometry = Geometry.read(sequence.geometry)
    size = geometry.block_size
    found = [Tensor.of(f"{prefix}tokens", np.asarray(sequence.tokens, np.int32))]
    for group, logical in enumerate(sequence.logical):
        found.append(Tensor.of(f"{prefix}logical.{group}", np.asarray(logical, np.int64)))
    for layer, buffers in enumerate(sequence.buffers):
        rows, groups = geometry.parts[layer]
        of_groups = [sequence.logical[group] for group in groups]
        logical = np.concatenate([np.empty(0, np.int64), *of_groups])
        fills = np.clip(int(sequence.length) - logical * size, 0, size)
        ids = np.arange(len(logical))
        shapes = geometry.buffer_shapes(rows, len(ids))
        for name, x, (dtype, shape) in zip(_BUFFERS, buffers, shapes, strict=True):
            if shape is None:
                found.append(Tensor.of(f"{prefix}{name}.{layer}", np.empty(_NO_BLOCKS, dtype)))
            else:
                pieces = block_pieces(functools.partial(np.asarray, x), ids, fills, size)
                found.append(tensor_of(f"{prefix}{name}.{layer}", dtype, shape, pieces))
    for layer, scales in enumerate(sequence.head_scales):
        for name, x in zip(_HEAD_SCALES, scales, strict=True):
            found.append(Tensor.of(f"{prefix}{name}.{layer}", x))
    return found + state_tensors(prefix, sequence.states)


def state_tensors(prefix: str, states: Sequence[Sequence[NDArray[Any]]]) -> list[Tensor]:
    """The states of one sequence, as bytes."""
    return [
        Tensor.of(f"{prefix}state.{i}.{j}", np.ascontiguousarray(x).reshape(-1).view(np.uint8))
        for i, of_layer in enumerate(states)
        for j, x in enumerate(of_layer)
    ]


def take_states(prefix: str, geometry: Geometry, length: int, file: Container) -> None:
    """Expect the states of a sequence."""
    for i, of_layer in enumerate(geometry.layers.with_states.values() if length else ()):
        for j, shape in enumerate(of_layer):
            file.take(f"{prefix}state.{i}.{j}", Spec(np.dtype(np.uint8), (shape.nbytes,)))


def read_states(
    prefix: str, geometry: Geometry, length: int, file: Container
) -> tuple[tuple[NDArray[Any], ...], ...]:
    """What `state_tensors` was given."""
    return tuple(
        tuple(
            file.array(f"{prefix}state.{i}.{j}").view(shape.dtype).reshape(shape.shape)
            for j, shape in enumerate(of_layer)
        )
        for i, of_layer in enumerate(geometry.layers.with_states.values() if length else ())
    )


def block_pieces(
    array: Callable[[], Any], ids: NDArray[Any], fills: NDArray[Any], size: int
) -> Callable[[], Iterator[NDArray[Any]]]:
    """Blocks of an array as pieces of a tensor.

    Parameters
    ----------
    array : callable
        Gives the array ``(num_blocks, num_kv_heads, block_size, …)`` in host memory.
    ids : int array (n,)
        The blocks, which rise.
    fills : int array (n,)
        Tokens in each block: what comes after them is none of the sequence's, and is written as zeros.
    size : int
        Tokens that a block has room for.
    """

    def pieces() -> Iterator[NDArray[Any]]:
        x = array()
        whole = fills >= size
        # Runs of blocks that are neighbours and full.
        ends = np.flatnonzero((np.diff(ids) != 1) | ~whole[1:] | ~whole[:-1]) + 1
        for run in np.split(np.arange(len(ids)), ends):
            if not len(run):
                continue
            first, last = int(ids[run[0]]), int(ids[run[-1]])
            if whole[run[0]]:
                yield np.ascontiguousarray(
                    x[first : last + 1]
                )  # in pages blocks do not lie together
            else:
                block = x[first : first + 1].copy()
                block[:, :, int(fills[run[0]]) :] = 0
                yield block

    return pieces


# -- loading


def read(fields: Fields, file: Container) -> list[SwappedSequence]:
    """Read and check the sequences of a file.

    Raises
    ------
    Damaged
        If one is not as it was written, or contradicts itself.
    """
    given, geometry = read_geometry(fields)
    parts = fields.parts("sequences")
    expect(bool(parts), "there are no sequences")
    counts = [_take(f"{i}.", part, geometry, file) for i, part in enumerate(parts)]
    file.all_taken()
    found = [
        _sequence(f"{i}.", part, given, geometry, logical, file)
        for i, (part, logical) in enumerate(zip(parts, counts, strict=True))
    ]
    file.verify()
    for i, sequence in enumerate(found):
        with claims(f"sequence {i}"):
            check_sequence(sequence)
    return found


def read_geometry(fields: Fields) -> tuple[tuple[Any, ...], Geometry]:
    """The geometry in a header, as it was given and checked."""
    given = _tuples(fields.get("geometry"))
    with claims("the geometry"):
        return given, Geometry.read(given)


def _tuples(x: Any) -> Any:
    """Lists of JSON as the tuples that they were."""
    return tuple(map(_tuples, x)) if isinstance(x, list) else x


def _take(prefix: str, fields: Fields, geometry: Geometry, file: Container) -> list[int]:
    """Expect the tensors of a sequence, and return how many blocks each group has."""
    fields.integer("length")
    tokens = file.spec(f"{prefix}tokens").shape
    expect(len(tokens) == 1, "token ids in several axes")
    file.take(f"{prefix}tokens", Spec(np.dtype(np.int32), tokens))
    counts = []
    for group in range(len(geometry.groups)):
        name = f"{prefix}logical.{group}"
        shape = file.spec(name).shape
        expect(len(shape) == 1 and shape[0] <= MOST, f"tensor {name!r} has shape {shape}")
        file.take(name, Spec(np.dtype(np.int64), shape))
        counts.append(shape[0])
    expect(fields.integers("blocks") == counts, "another number of blocks than the header says")
    expect(
        fields.integer("tokens") == tokens[0], "another number of token ids than the header says"
    )
    take_states(prefix, geometry, fields.integer("length"), file)
    head_scales = geometry.head_scale_shapes()
    for layer, (rows, groups) in enumerate(geometry.parts):
        with claims("the sizes"):
            shapes = geometry.buffer_shapes(rows, sum(counts[group] for group in groups))
        for name, (dtype, of_blocks) in zip(_BUFFERS, shapes, strict=True):
            shape = _NO_BLOCKS if of_blocks is None else of_blocks
            file.take(f"{prefix}{name}.{layer}", Spec(dtype, shape))
    for layer, of_layer in enumerate(head_scales):
        for name, count in zip(_HEAD_SCALES, of_layer, strict=True):
            file.take(f"{prefix}{name}.{layer}", Spec(np.dtype(np.float32), (count,)))
    return counts


def _sequence(
    prefix: str, fields: Fields, given: tuple[Any, ...], geometry: Geometry, counts: list[int],
    file: Container,
) -> SwappedSequence:  # fmt: skip
    def large(name: str) -> NDArray[Any]:
        spec = file.spec(name)
        x = np.empty(spec.shape, spec.dtype)
        file.fill(name, [x])
        return x

    buffers: list[tuple[NDArray[Any], ...]] = [
        tuple(large(f"{prefix}{name}.{layer}") for name in _BUFFERS)
        for layer in range(len(geometry.parts))
    ]
    scales = [
        (
            file.array(f"{prefix}{_HEAD_SCALES[0]}.{layer}"),
            file.array(f"{prefix}{_HEAD_SCALES[1]}.{layer}"),
        )
        for layer in range(len(geometry.head_scale_shapes()))
    ]
    return SwappedSequence(
        fields.integer("length"),
        file.array(f"{prefix}tokens"),
        unpacked(fields.get("extra")),
        given,
        [file.array(f"{prefix}logical.{group}") for group in range(len(counts))],
        buffers,
        tuple(fields.integers("starts")),
        tuple(scales),
        read_states(prefix, geometry, fields.integer("length"), file),
    )


def packed(extra: Any) -> Any:
    """Extra keys for JSON, which has no bytes."""
    if extra is None:
        return None
    return {k: {"bytes": v.hex()} if isinstance(v, bytes) else v for k, v in extra.items()}


def unpacked(extra: Any) -> Any:
    """What `packed` was given."""
    if extra is None:
        return None
    expect(isinstance(extra, dict), "extra keys are no object")
    found: dict[str, Any] = {}
    for key, value in extra.items():
        if isinstance(value, dict):
            with claims("extra keys"):
                expect(list(value) == ["bytes"] and isinstance(value["bytes"], str), "no bytes")
                found[key] = bytes.fromhex(value["bytes"])
        else:
            plain = isinstance(value, int | str) and not isinstance(value, bool)
            expect(plain, f"the extra key {key!r} is neither number nor text")
            found[key] = value
    return found
