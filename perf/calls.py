"""Calls for one token of one sequence, where the rows themselves take next to no time: what a call costs.

`CALLS` are makers of contestants by name. A contestant makes `BATCH` calls at a time, as one is too short for the
clock, then takes back what they appended; it has been checked.
"""

import functools
import itertools

import numpy as np

import numkv
from perf.peers import CannotRun, Contestant

HEADS, Q_HEADS, DIM = 8, 32, 128
BATCH = 32
LENGTH = 4 * BATCH  # more tokens than a batch appends
BLOCK_SIZE = 16
KINDS = ("fp32", "fp16", "int8")


def _rows(heads, tokens=1):
    return np.random.default_rng(0).standard_normal((tokens, heads, DIM), np.float32)


def _contestant(call, check, back=None):
    """Calls `call` again and again, and `back` after each batch; ``check()`` is whether it does what it should."""

    def run(_):
        for _ in range(BATCH):
            call()
        if back is not None:
            back()

    call()
    if not check():
        raise CannotRun("the call does not do what it should")
    if back is not None:
        back()
    run(0)
    return Contestant(run, np.asarray, 1, 0, calls=BATCH)


def _append():
    new = _rows(HEADS).reshape(1, HEADS, 1, DIM)
    k, v = (np.zeros((1, HEADS, LENGTH, DIM), np.float32) for _ in range(2))
    offsets = np.array([3])
    return _contestant(
        lambda: numkv.append(new, new, k, v, offsets), lambda: np.array_equal(k[:, :, 3:4], new)
    )


def _paged_append(kind):
    rows, layer = _rows(HEADS), _layer("PagedLayer", kind)
    k, v, slots, scales = layer.k, layer.v, np.array([5]), _scales(layer)
    return _contestant(
        lambda: numkv.paged_append(rows, rows, k, v, slots, **scales), lambda: k[0, :, 5].any()
    )


def _layer(name, kind, heads=HEADS):
    if name == "PagedLayer":
        return numkv.PagedLayer(LENGTH // BLOCK_SIZE, BLOCK_SIZE, heads, DIM, kind=kind)
    return numkv.ContiguousLayer(LENGTH, heads, DIM, kind=kind)


def _scales(layer):
    """Scales as functions take them, where the kind has some."""
    if not layer.k_scale.size:
        return {}
    return {"k_scale": layer.k_scale, "v_scale": layer.v_scale}


def _layer_append(name, kind):
    layer, rows = _layer(name, kind), _rows(HEADS)
    layer.append(rows, rows)
    return _contestant(
        lambda: layer.append(rows, rows), lambda: len(layer) == 2, lambda: layer.truncate(1)
    )


def _layer_write(name, kind):
    layer = _layer(name, kind)
    layer.append(_rows(HEADS), _rows(HEADS))
    qkv = _rows(Q_HEADS + 2 * HEADS).reshape(1, -1)
    cos, sin = (np.ones((LENGTH, DIM // 2), np.float32) for _ in range(2))
    q_out = np.zeros((1, Q_HEADS, DIM), np.float32)
    options = {"num_q_heads": Q_HEADS, "cos": cos, "sin": sin, "q_out": q_out}
    return _contestant(
        lambda: layer.write(qkv, qk_mode=numkv.QKMode.HALF_SPLIT, **options),
        lambda: len(layer) == 2 and q_out.any(),
        lambda: layer.truncate(1),
    )


def _layer_attention(name, kind):
    """Eight tokens of one head: as good as nothing to attend to."""
    layer, rows = _layer(name, kind, 1), _rows(1, 8)
    layer.append(rows, rows)
    q = rows[:1]
    return _contestant(lambda: layer.decode_attention(q), lambda: layer.decode_attention(q).any())


def _decode_attention(kind):
    layer, rows, lens = _layer("ContiguousLayer", kind, 1), _rows(1, 8), np.array([8])
    layer.append(rows, rows)
    q, k, v, scales = rows[:1], layer.k, layer.v, _scales(layer)
    call = lambda: numkv.decode_attention(q, k, v, lens, **scales)  # noqa: E731
    return _contestant(call, lambda: call().any())


def _paged_decode_attention(kind):
    layer, rows, lens = _layer("PagedLayer", kind, 1), _rows(1, 8), np.array([8])
    layer.append(rows, rows)
    q, k, v, table, scales = rows[:1], layer.k, layer.v, layer.block_table[None], _scales(layer)
    call = lambda: numkv.paged_decode_attention(q, k, v, table, lens, **scales)  # noqa: E731
    return _contestant(call, lambda: call().any())


def _cache_append(kind):
    """A token of a model of one layer."""
    cache, row = numkv.KVCache(1, HEADS, DIM, max_seq_len=LENGTH, kind=kind), _rows(HEADS)[0]

    def call():
        cache.append(0, row, row)
        cache.advance()

    return _contestant(call, lambda: cache.k(0).any(), lambda: cache.truncate(0))


def _cache_attention(kind):
    cache, rows = numkv.KVCache(1, 1, DIM, max_seq_len=LENGTH, kind=kind), _rows(1, 8)
    cache.append(0, rows, rows)
    cache.advance(8)
    q = rows[:1]
    call = lambda: cache.decode_attention(0, q)  # noqa: E731
    return _contestant(call, lambda: call().any())


def _paged_cache_step(kind):
    """Reserve, append to one layer, commit."""
    cache = numkv.PagedKVCache(1, HEADS, DIM, num_blocks=16, block_size=BLOCK_SIZE, kind=kind)
    seq, rows = cache.add(), _rows(HEADS)

    def call():
        step = cache.reserve([seq], 1)
        step.append(0, rows, rows)
        cache.commit(step)

    return _contestant(call, lambda: cache.length(seq) == 1, lambda: cache.truncate(seq, 0))


def _sliding_step(kind):
    """The next token of a sequence that is longer than the window: `start_forward`, `put`, `decode_attention`."""
    window = 31
    # Another class in trees before `CausalCache` had a window.
    cache = getattr(numkv, "SlidingWindowCache", numkv.CausalCache)(window_left=window)
    cache.init(kind, 1, LENGTH, 1)
    row, positions, outs = _rows(1), itertools.count(), []

    def call():
        cache.start_forward(numkv.Batch([next(positions)], [0]))
        cache.put(0, row, row)
        outs[:] = [cache.decode_attention(0, row)]

    for _ in range(2 * window):
        call()
    return _contestant(call, lambda: outs[0].any())


def _by_kind(name, make, *args):
    return {f"{name} {kind}": functools.partial(make, *args, kind) for kind in KINDS}


CALLS = {
    "append": _append,
    **_by_kind("paged_append", _paged_append),
    **_by_kind("decode_attention", _decode_attention),
    **_by_kind("paged_decode_attention", _paged_decode_attention),
    **_by_kind("ContiguousLayer.append", _layer_append, "ContiguousLayer"),
    **_by_kind("PagedLayer.append", _layer_append, "PagedLayer"),
    **_by_kind("ContiguousLayer.write", _layer_write, "ContiguousLayer"),
    **_by_kind("PagedLayer.write", _layer_write, "PagedLayer"),
    **_by_kind("PagedLayer.decode_attention", _layer_attention, "PagedLayer"),
    **_by_kind("KVCache.append", _cache_append),
    **_by_kind("KVCache.decode_attention", _cache_attention),
    **_by_kind("PagedKVCache step", _paged_cache_step),
    **_by_kind("CausalCache step, window", _sliding_step),
}
