"""Looks at a cache and says what there is to draw of it: `picture_of`.

Caches are known by the names of their classes, as this room lies below theirs. They are asked for what is public, and
by ``__drawn__()`` for the little that is not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from numkv.drawing.picture import Picture, State, Strip, format_bytes, in_short, plural

#: Signs of sequences in a strip of cells; further ones share a plus.
_SIGNS = "0123456789abcdefghijklmnopqrstuvwxyz"


def picture_of(cache: Any) -> Picture:
    """Look at a cache.

    Parameters
    ----------
    cache : object
        Any cache, layer or pool, one for transformers too, a compressor, or a swapped sequence.

    Returns
    -------
    Picture

    Raises
    ------
    TypeError
        If it is nothing that can be drawn.
    """
    for cls in type(cache).__mro__:
        if cls.__module__.partition(".")[0] == "numkv" and cls.__name__ in _LOOKS:
            return _LOOKS[cls.__name__](cache)
    raise TypeError(
        f"`cache`: expected a cache, a layer, a pool, a compressor or a swapped sequence, got {type(cache).__name__}; "
        "pass one of these"
    )


def _storage(of: Any) -> str:
    """How the rows of a layer are stored, from its `LayerSpec`."""
    text = f"{of.kind}" if of.v_kind in (None, of.kind) else f"{of.kind}/{of.v_kind}"
    if of.v_kind == "latent":
        text = f"{of.kind}, latent"
    return f"{text}, rotated" if of.rotate else text


def _heads(number: int, dim: int, dim_v: int) -> str:
    dims = f"{dim}" if dim == dim_v else f"{dim} and {dim_v}"
    return f"{plural(number, 'kv head')} of {dims}"


def _facts(cache: Any, of: Any, layers: int | None = None) -> list[str]:
    facts = [_storage(of)]
    if layers is not None:
        facts.append(plural(layers, "layer"))
    facts.append(_heads(of.num_kv_heads, of.head_dim, of.head_dim_v))
    return [*facts, str(cache.target), format_bytes(cache.nbytes)]


# ---------------------------------------------------------------- one sequence


def _one_sequence(cache: Any) -> Picture:
    """A `KVCache` or a layer that has a stretch of rows of its own."""
    several = hasattr(cache, "num_layers")
    length = len(cache) if several else cache.seq_len
    quantised = cache.quantised_tokens(0) if several else cache.quantised_tokens
    room = max(cache.capacity, length)
    text = f"tokens: {length:,} of {room:,}"
    if several and cache.max_seq_len is None:
        text += ", grows"
    runs = [(room - length, State.FREE, "")]
    of = cache.layers[0] if several else cache.spec
    if of.full_precision is not None:
        begin, end = min(quantised.start, length), min(quantised.stop, length)
        end = max(begin, end)
        runs = [
            (begin, State.EXACT, ""), (end - begin, State.FULL, ""), (length - end, State.EXACT, ""), *runs,
        ]  # fmt: skip
    else:
        runs = [(length, State.FULL, ""), *runs]
    facts = _facts(cache, of, cache.num_layers if several else None)
    lines = []
    if several and (ahead := cache.__drawn__() - length) > 0:
        lines.append(("pending", f"{plural(ahead, 'token')} appended, which count after advance"))
    return Picture(type(cache).__name__, facts, [Strip(text, runs)], lines)


def _paged_layer(layer: Any) -> Picture:
    pool = layer.pool.blocks
    own = np.asarray(layer.block_indices, np.int64)
    states = np.where(pool.ref_count(np.arange(pool.num_blocks)) > 0, 1, 0).astype(np.int64)
    states[own] = 2
    filled, part = divmod(layer.seq_len, layer.block_size)
    states[own[filled:]] = 0  # taken ahead of its tokens
    if part and filled < len(own):
        states[own[filled]] = 3
    names = [(State.FREE, ""), (State.OTHER, ""), (State.FULL, ""), (State.PART, "")]
    text = f"blocks: {len(own):,} of {pool.num_blocks:,}, {plural(layer.block_size, 'token')} each"
    line = ("table", f"{plural(layer.seq_len, 'token')}, blocks {in_short(own.tolist()) or 'none'}")
    return Picture("PagedLayer", _facts(layer, layer.spec), [Strip.of(text, states, names)], [line])


# ---------------------------------------------------------------- blocks of many sequences

_BLOCKS = [
    (State.FREE, ""), (State.FULL, ""), (State.SHARED, ""), (State.PART, ""), (State.CACHED, ""),
]  # fmt: skip


def _states_of(pool: Any) -> NDArray[np.int64]:
    ids = np.arange(pool.num_blocks)
    references = pool.ref_count(ids)
    states: NDArray[np.int64] = np.minimum(references, 2).astype(np.int64)
    states[(references == 0) & pool.is_cached(ids)] = 4
    return states


def _mark_last(states: NDArray[np.int64], table: Any, length: int, block_size: int) -> None:
    """Mark the block of a sequence's last tokens, unless it is full or shared."""
    place, filled = divmod(length, block_size)
    if filled and place < len(table) and table[place] >= 0 and states[table[place]] == 1:
        states[table[place]] = 3


def _block_strip(states: NDArray[np.int64], block_size: int) -> Strip:
    used = int(((states > 0) & (states < 4)).sum())
    text = f"blocks: {used:,} of {len(states):,} in use, {plural(block_size, 'token')} each"
    return Strip.of(text, states, _BLOCKS)


def _paged_pool(pool: Any) -> Picture:
    return Picture(
        "PagedPool",
        _facts(pool, pool.spec),
        [_block_strip(_states_of(pool.blocks), pool.blocks.block_size)],
    )


def _paged_cache(cache: Any) -> Picture:
    states = _states_of(cache.blocks)
    layers, in_full = cache.__drawn__()
    lines = []
    for seq in cache.sequences:
        length, parts = cache.length(seq), []
        windows: dict[int, list[tuple[list[int], list[int]]]] = {}  # layers and blocks of groups
        for of_group in layers:
            table = cache.block_table(seq, of_group[0])
            _mark_last(states, table, length, cache.block_size)
            windows.setdefault(cache.layers[of_group[0]].window_left, []).append(
                (of_group, table[table >= 0].tolist())
            )
        many = any(len(groups) > 1 for groups in windows.values())
        for window, groups in windows.items():
            what = "blocks" if window < 0 else f"window {window} blocks"
            parts += [] if many else [f"{what} {in_short(groups[0][1]) or 'none'}"]
        for table in in_full[seq]:
            _mark_last(states, table, length, cache.block_size)
            parts.append(f"in full {in_short(table[table >= 0].tolist()) or 'none'}")
        cached = cache.cached_len(seq)
        found = f" ({cached:,} found)" if cached else ""
        lines.append((str(seq), ", ".join([f"{plural(length, 'token')}{found}", *parts])))
        lines += [("", _blocks_each(*item)) for item in windows.items() if many]
    return Picture(
        "PagedKVCache",
        _facts(cache, next(x for x in cache.layers if x.head_dim is not None), cache.num_layers),
        [_block_strip(states, cache.block_size)],
        lines,
    )


def _blocks_each(window: int, groups: list[tuple[list[int], list[int]]]) -> str:
    """Return how many blocks a sequence has in each of the groups of layers with one window."""
    layers = in_short(sorted(layer for of_group, _ in groups for layer in of_group))
    counts = sorted({len(blocks) for _, blocks in groups})
    number = str(counts[0]) if len(counts) == 1 else f"{counts[0]}-{counts[-1]}"
    what = "" if window < 0 else f"window {window}, "
    return f"layers {layers}: {what}{number} {'block' if number == '1' else 'blocks'} each"


def _swapped(swapped: Any) -> Picture:
    (heads, block_size, dim, dim_v), kind, v_kind, windows, seed, *_ = swapped.geometry
    facts = [
        str(kind) if kind == v_kind else f"{kind}/{v_kind}",
        plural(len(windows), "layer"),
        _heads(heads, dim, dim_v),
        format_bytes(swapped.nbytes),
    ]
    if seed is not None:
        facts[0] += ", rotated"
    num_blocks = sum(map(len, swapped.logical))
    full = num_blocks - bool(swapped.length % block_size) * len(swapped.logical)
    runs = [(full, State.FULL, ""), (num_blocks - full, State.PART, "")]
    text = f"blocks: {num_blocks:,}, {plural(block_size, 'token')} each"
    known = f"{plural(swapped.length, 'token')}, {len(swapped.tokens):,} ids known"
    return Picture("SwappedSequence", facts, [Strip(text, runs)], [("sequence", known)])


# ---------------------------------------------------------------- cells


def _before(cache: Any) -> Picture | None:
    """Describe a cache without memory (yet); None for one with memory."""
    state, _ = cache.__drawn__()
    if state == "ready":
        return None
    return Picture(type(cache).__name__, ["closed" if state == "closed" else "before init"])


def _multi_facts(cache: Any) -> list[str]:
    layers = cache.layers
    facts = [*map(_storage, list(layers.values())[:1]), plural(len(layers), "layer") + " so far"]
    return [*facts, str(cache.target), format_bytes(cache.nbytes)]


def _cells(cache: Any) -> Picture:
    if (empty := _before(cache)) is not None:
        return empty
    (_, block_pool), sequences = cache.__drawn__(), cache.sequences
    names = [(State.FREE, ""), (State.SHARED, "")]
    index = np.zeros(cache.num_cells, np.int64)
    for seq in sequences:
        names.append((State.FULL, _SIGNS[seq] if seq < len(_SIGNS) else "+"))
        index[block_pool.owned(seq)] = len(names) - 1
    index[block_pool.num_sequences > 1] = 1
    used = cache.num_cells - cache.num_free
    strip = Strip.of(f"cells: {used:,} of {cache.num_cells:,} in use", index, names)
    lines = []
    for seq in sequences:
        at = cache.positions(seq).tolist()
        text = f"{plural(len(at), 'token')}, positions {in_short(at) or 'none'}"
        lines.append((str(seq), text))
    return Picture(type(cache).__name__, _multi_facts(cache), [strip], lines)


def _encoder(cache: Any) -> Picture:
    if (empty := _before(cache)) is not None:
        return empty
    text = "rows are there" if cache.encoder_cached else "no rows"
    return Picture("EncoderCache", [*_multi_facts(cache), text])


def _wrapper(cache: Any) -> Picture:
    children = [picture_of(child) for child in cache.caches]
    return Picture("WrapperCache", [plural(len(children), "cache")], parts=children)


# ---------------------------------------------------------------- for transformers


def _for_transformers(cache: Any) -> Picture:
    """A `NumkvCache`: layers of one history have the same blocks, and are drawn once."""
    own = [layer for layer in cache.layers if hasattr(layer, "metadata")]
    facts = [own[0].storage, plural(len(own), "layer")]
    if len(own) < len(cache.layers):
        facts.append(f"{len(cache.layers) - len(own)} of transformers")
    ready = [layer for layer in own if layer.metadata is not None]
    strips, lengths = [], np.zeros(0, np.int64)
    if ready:
        pool, metadata = ready[0].pool, ready[0].metadata
        facts.append(_heads(int(pool.k.shape[1]), pool.head_dim, pool.head_dim_v))
        lengths = metadata.lengths
        alike: dict[int, list[Any]] = {}
        for layer in ready:
            alike.setdefault(id(layer.metadata), []).append(layer)
        strips = [_strip_of_blocks(layers) for layers in alike.values()]
    picture_lines = [(str(i), plural(n, "token")) for i, n in enumerate(lengths.tolist())]
    return Picture("NumkvCache", [*facts, "cpu", format_bytes(cache.nbytes)], strips, picture_lines)


def _strip_of_blocks(layers: list[Any]) -> Strip:
    """Return the blocks of layers that have the same ones."""
    metadata, reach = layers[0].metadata, layers[0].reach
    size, held = metadata.block_size, metadata.table[metadata.held()]
    states = np.minimum(np.bincount(held, minlength=metadata.num_blocks), 2)  # by owners
    states[(states == 1) & (metadata.fills() < size)] = 3
    used = int((states > 0).sum())
    text = f"blocks: {used:,} of {metadata.num_blocks:,}, {plural(size, 'token')} each"
    if reach >= 0:
        text += f", of {plural(len(layers), 'layer')} that see {plural(reach, 'earlier token')}"
    return Strip.of(text, states, _BLOCKS)


# ---------------------------------------------------------------- compressed heads


def _facts_of_codes(compressor: Any) -> list[str]:
    bits, v_bits = compressor.config.bits, compressor.config.v_bits
    return [
        f"{bits} bits" if v_bits is None else f"{bits} bits, values {v_bits}",
        f"{plural(compressor.num_kv_heads, 'kv head')} of {compressor.head_dim}",
        str(compressor.target),
        format_bytes(compressor.nbytes),
    ]


def _compressor(compressor: Any) -> Picture:
    tokens, room = len(compressor), max(compressor.capacity, len(compressor))
    runs = [(tokens, State.FULL, ""), (room - tokens, State.FREE, "")]
    strip = Strip(f"tokens: {tokens:,} of {room:,}, grows", runs)
    return Picture(type(compressor).__name__, _facts_of_codes(compressor), [strip])


def _paged_compressor(compressor: Any) -> Picture:
    stored, size = compressor.__drawn__(), compressor.block_size
    states = np.minimum(stored.references(), 2).astype(np.int64)
    lines = []
    for seq, (blocks, length) in stored.sequences.items():
        _mark_last(states, blocks, length, size)
        text = f"{plural(length, 'token')}, blocks {in_short(blocks.tolist()) or 'none'}"
        lines.append((str(seq), text))
    strip = _block_strip(states, size)
    return Picture(type(compressor).__name__, _facts_of_codes(compressor), [strip], lines)


_LOOKS: dict[str, Callable[[Any], Picture]] = {
    "KVCache": _one_sequence,
    "ContiguousLayer": _one_sequence,
    "PagedLayer": _paged_layer,
    "PagedPool": _paged_pool,
    "PagedKVCache": _paged_cache,
    "SwappedSequence": _swapped,
    "CausalCache": _cells,
    "EncoderCache": _encoder,
    "WrapperCache": _wrapper,
    "NumkvCache": _for_transformers,
    "Compressor": _compressor,
    "PagedCompressor": _paged_compressor,
}
