"""The table of the test of memory that runs out: every class that holds tokens, with its calls.

A `Subject` makes an object, returns all that can be seen of it, and has a call for each method. A call's preparation
stands before it in a pair: only the call itself has to leave everything as it was.
"""

import dataclasses
import functools

import fault_bound
import fault_channels
import fault_compressors
import fault_latents
import fault_sparse
import fault_states
import numpy as np
from fault_base import (
    BLOCK,
    DIM,
    F32,
    FUSED,
    HEADS,
    TABLES,
    Subject,
    plain,
    projections,
    queries,
    refused,
    rows,
)
from fault_functions import CONTIGUOUS, FILES, PAGED, Arrays, Folder, see_arrays, see_folder
from layer_lists import paged_kv_cache

import numkv
from numkv.blocks import BlockPool, block_digests

# ---------------------------------------------------------------- caches of one sequence

_SHIFT = numkv.rope_shift(*TABLES)


def _kv_cache(kind, **options):
    def make():
        cache = numkv.KVCache(2, HEADS, DIM, kind=kind, **options)
        for layer in range(2):
            cache.append(layer, *rows(11, layer))
        cache.advance(11)
        cache.append(0, *rows(2, 5))  # not advanced
        return cache

    return make


def _see_kv_cache(cache):
    return plain(
        [len(cache), cache.is_empty]
        + [[cache.k(i), cache.v(i), cache.quantised_tokens(i)] for i in range(2)]
        + [cache.decode_attention(0, queries(1), return_lse=True)]
    )


def _append_to_the_other(cache):
    cache.append(1, *rows(2, 5))


def _level(cache):
    _append_to_the_other(cache)
    cache.advance(2)


_KV_CACHE = {
    "append one token": lambda c: c.append(1, *rows(1, 7)),
    "append": lambda c: c.append(1, *rows(9, 7)),
    "append, which grows": lambda c: c.append(1, *rows(200, 7)),
    "advance": (_append_to_the_other, lambda c: c.advance(2)),
    "truncate": lambda c: c.truncate(4),
    "compact": (_level, lambda c: c.compact([0, 2, 5, 12], _SHIFT)),
    "compact without a shift": (_level, lambda c: c.compact([0, 1, 2, 9])),
    "decode_attention": lambda c: c.decode_attention(0, queries(2), return_lse=True),
    "attention_weights": lambda c: c.attention_weights(0, queries(2)),
    "key_error": refused(lambda c: c.key_error(0, queries(2))),  # of floats
    "k": lambda c: [c.k(0), c.v(1)],
    "arrays": refused(lambda c: c.arrays(1)),  # with full-precision tokens
}


def _contiguous_layer(kind, **options):
    def make():
        layer = numkv.ContiguousLayer(40, HEADS, DIM, kind=kind, **options)
        layer.append(*rows(11))
        return layer

    return make


def _paged_layer(kind, **options):
    def make():
        pool = numkv.PagedPool(30, BLOCK, HEADS, DIM, kind=kind)
        other, layer = (numkv.PagedLayer(12, BLOCK, HEADS, DIM, pool=pool, **options) for _ in "ab")
        other.append(*rows(3, 3))
        layer.append(*rows(11))
        layer.pool_and_other = pool, other
        return layer

    return make


def _see_layer(layer):
    # Which blocks it has does not matter: any free one is as good.
    seen = [layer.seq_len, len(layer.block_indices), list(layer.quantised_tokens)]
    seen += [
        layer.decode_attention(queries(min(n, layer.seq_len)), return_lse=True) for n in (1, 3)
    ]
    seen += [layer.attention_weights(queries(1))] if layer.seq_len else []
    if layer.is_paged:
        pool, other = layer.pool_and_other
        seen += [pool.blocks.num_free, _of_now(pool.blocks.stats()), len(other.block_indices)]
        seen += [other.decode_attention(queries(1))]
        pool.check()
    seen += [_see_layer(layer.copied)] if hasattr(layer, "copied") else []
    return plain(seen)


def _of_now(stats):
    """Return statistics of blocks, without counts of allocations, which a failed call may raise."""
    return dataclasses.replace(stats, peak_used=0, allocations=0)


def _copy_layer(layer):
    """Keep the copy: its blocks are those of the same pool."""
    layer.copied = layer.copy()


_LAYER = fault_latents.OF_LAYER | {
    "append one token": lambda c: c.append(*rows(1, 7)),
    "append": lambda c: c.append(*rows(9, 7)),
    "write one token": lambda c: c.write(projections(1), **FUSED),
    "write": lambda c: c.write(projections(5), **FUSED),
    "truncate": lambda c: c.truncate(4),
    "seq_len": lambda c: setattr(c, "seq_len", 3),
    "compact": lambda c: c.compact([0, 2, 5, 9], _SHIFT),
    "compact without a shift": lambda c: c.compact([0, 1, 2, 9]),
    "decode_attention": lambda c: c.decode_attention(queries(2), return_lse=True),
    "attention_weights": lambda c: c.attention_weights(queries(2)),
    "key_error": refused(lambda c: c.key_error(queries(2))),
}
_PAGED_LAYER = _LAYER | {
    "free": lambda c: c.free(),
    "take_blocks": lambda c: c.take_blocks([20, 17]),
    "copy": _copy_layer,
}
_LONGER = {"seq_len, larger": lambda c: setattr(c, "seq_len", 20)}


# ---------------------------------------------------------------- many sequences, in blocks


def _paged_cache(kind, windows=None, **options):
    def make():
        cache = paged_kv_cache(
            2, HEADS, DIM, num_blocks=64, block_size=BLOCK, kind=kind, windows=windows, **options
        )
        for tokens, named in ((7, True), (5, False)):
            ids = np.arange(tokens)
            seq = cache.add(ids if named else None)
            _grow(cache, seq, tokens, ids if named else None)
        cache.fork(0)
        return cache

    return make


def _grow(cache, seq, tokens, ids=None):
    step = cache.reserve([seq], [tokens])
    for layer in range(2):
        step.append(layer, *rows(tokens, layer))
    cache.commit(step, token_ids=ids)
    return cache


def _stats(cache):
    found = cache.stats()
    return dataclasses.replace(found, pool=_of_now(found.pool))


def _see_paged_cache(cache):
    cache.check()
    seqs = list(cache.sequences)
    seen = [[seq, cache.length(seq), cache.cached_len(seq)] for seq in seqs]
    seen += [_stats(cache), cache.num_free, cache._next, _books(cache)]
    for state in cache._sequences.values():
        seen += [state.tokens, state.registered, state.reserved, state.starts]
    q = queries(max(1, len(seqs)))[: len(seqs)]
    seen += [cache.decode_attention(layer, seqs, q, return_lse=True) for layer in range(2)]
    return plain(seen)


def _books(cache):
    """Return tables and counts, with blocks numbered by first use: any free block is as good as another."""
    tables = [table.tolist() for state in cache._sequences.values() for table in state.tables]
    used = [block for block in dict.fromkeys(b for table in tables for b in table) if block >= 0]
    number = {block: i for i, block in enumerate(used)}
    pool, rest = cache.blocks, [b for b in range(64) if b not in number]
    counts = [(pool.ref_count(x), pool.pin_count(x), pool.is_cached(x)) for x in (used, rest)]
    counts[1] = [np.sort(x) for x in counts[1]]
    return [[number.get(b, -1) for b in table] for table in tables], counts


def _step_of_both(cache):
    cache.step = cache.reserve([0, 1], [1, 2])
    for layer in range(2):
        cache.step.append(layer, *rows(3, 9))


def _swapped(cache):
    cache.swapped = cache.swap_out(0)


def _with_step(make):
    """A cache with a step in which one layer of two is written, of sequences that share blocks."""
    cache = make()
    cache.step = cache.reserve([1, 2], [3, 2])
    cache.step.append(0, *rows(5, 9))
    return cache


def _write_the_other(cache):
    cache.step.append(1, *rows(5, 9))


_PAGED_CACHE = {
    "add": lambda c: c.add(),
    "add a known prompt": lambda c: c.add(np.arange(9)),
    "add with extra": lambda c: c.add(np.arange(9), extra={"adapter": 7}),
    "fork": lambda c: c.fork(0),
    "remove": lambda c: c.remove(2),
    "truncate": lambda c: c.truncate(0, 6),
    "compact": lambda c: c.compact(1, [0, 3, 4], _SHIFT),
    "compact a shared sequence": lambda c: c.compact(2, [0, 3, 4, 5, 6], _SHIFT),
    "pin": lambda c: c.pin(0),
    "unpin": (lambda c: c.pin(0), lambda c: c.unpin(0)),
    "reserve": lambda c: plain(c.reserve([0, 1], [3, 1]).num_tokens),
    "step_buffers": lambda c: plain(c.step_buffers(2, 4, 8).num_tokens),
    "swap_out": lambda c: plain(c.swap_out(0)),
    "swap_in": (_swapped, lambda c: c.swap_in(c.swapped)),
    "decode_attention": lambda c: c.decode_attention(0, [0, 1], queries(2)),
    "attention_weights": lambda c: c.attention_weights(0, 1, queries(2)),
    "key_error": refused(lambda c: c.key_error(0, 1, queries(2))),
    "stats": lambda c: c.stats(),
    "arrays": lambda c: list(c.arrays(1)),
    "block_table": lambda c: c.block_table(1, 1),
    "commit": (_step_of_both, lambda c: c.commit(c.step)),
    "rollback": (_step_of_both, lambda c: c.rollback(c.step)),
}
# Calls that a cache with tokens in full precision does in its own way, or refuses.
_IN_FULL = (
    "add a known prompt", "reserve", "truncate", "compact", "decode_attention", "commit", "append", "write",
    "attention",
)  # fmt: skip
_NOT_IN_FULL = {
    "bind": refused(lambda c: c.bind(4)),
    "step_buffers": refused(lambda c: c.step_buffers(2, 4, 8)),
    "attention_weights": refused(lambda c: c.attention_weights(0, 1, queries(2))),
}
_NOT_IN_STEPS = {
    "attention_weights": refused(lambda c: c.step.attention_weights(0, queries(5))),
    "mark_written": refused(lambda c: c.step.mark_written(1)),
}
_STEP = {
    "append": lambda c: c.step.append(1, *rows(5, 9)),
    "write": lambda c: c.step.write(1, projections(5), **FUSED), **fault_latents.OF_STEP,
    "attention": lambda c: c.step.attention(0, queries(5), return_lse=True),
    "attention_weights": lambda c: c.step.attention_weights(0, queries(5)),
    "arrays": lambda c: list(c.step.arrays(1)),
    "mark_written": lambda c: c.step.mark_written(1),
    "commit": (_write_the_other, lambda c: c.commit(c.step)),
    "commit what was accepted": (_write_the_other, lambda c: c.commit(c.step, [1, 2])),
    "commit with token ids": (_write_the_other, lambda c: c.commit(c.step, token_ids=range(5))),
    "rollback": lambda c: c.rollback(c.step),
}  # fmt: skip


def _see_step(cache):
    seen = [cache.step.open, list(cache.step.unwritten_layers), cache.num_free, _books(cache)]
    seen += [[s.length, s.tokens, s.registered] for s in cache._sequences.values()]
    if cache.step.open:
        seen.append(cache.step.attention(0, queries(5), return_lse=True))
    cache.check()
    return plain(seen)


def _block_pool():
    pool = numkv.PagedKVCache(1, 1, 2, num_blocks=20, block_size=BLOCK).blocks
    taken = pool.allocate(6)
    pool.register(taken[:3], _names(), np.arange(6))
    pool.release(taken[:1])
    pool.pin(taken[2:3])
    return pool


def _names(extra=None):
    return block_digests(np.arange(6), BLOCK, extra=extra)


def _see_block_pool(pool):
    pool.check()
    return plain(
        [pool.num_free, pool.stats(), pool._state, pool._digests, pool._tokens, pool.miss_reason]
    )


_BLOCK_POOL = {
    "allocate": lambda p: p.allocate(5),
    "allocate what was released": lambda p: p.allocate(15),
    "allocate_ids": lambda p: p.allocate_ids([0, 9]),
    "release": lambda p: p.release([1, 2]),
    "acquire": lambda p: p.acquire([0, 1]),
    "ref_count": lambda p: p.ref_count([0, 1]),
    "pin_count": lambda p: p.pin_count([0, 2]),
    "register": lambda p: p.register([3, 4, 5], _names({"a": 1}), np.arange(6)),
    "lookup": lambda p: p.lookup(_names(), np.arange(6)),
    "find": lambda p: p.find(_names(), np.arange(6)),
    "find_each": lambda p: p.find_each(_names(), np.arange(6)),
    "is_cached": lambda p: p.is_cached([0, 5]),
    "forget": lambda p: p.forget([1]),
    "forget all": (lambda p: p.unpin([2]), lambda p: p.forget()),
    "pin": lambda p: p.pin([1]),
    "unpin": lambda p: p.unpin([2]),
    "stats": lambda p: p.stats(),
}


# ---------------------------------------------------------------- many sequences, in cells


def _cells(make, kind="fp32", **options):
    def begin():
        cache = make()
        cache.init(kind, 2, 16, 6, **options)
        _step(cache, [0, 1, 2, 3, 0, 1], [0, 0, 0, 0, 1, 1])
        _step(cache, [4, 2], [0, 1])
        return cache

    return begin


def _layers(cache):
    return range(3 if isinstance(cache, numkv.WrapperCache) else 2)


def _step(cache, positions, sequences, seed=0):
    cache.start_forward(numkv.Batch(positions, sequences))
    for layer in _layers(cache):
        cache.put(layer, *rows(len(positions), seed + layer))
    return cache


def _see_cells(cache):
    parts = cache.caches if isinstance(cache, numkv.WrapperCache) else [cache]
    seen = []
    for part in parts:
        part._cells.check()
        seen += [part.num_free, part.num_cells, part.nbytes, repr(part)]
        seen += [[seq, part.positions(seq)] for seq in part.sequences]
    for layer in _layers(cache):
        try:
            k, v, mask = cache.get(layer)
        except numkv.NumkvError as error:  # there is no pass
            seen.append(str(error))
            continue
        seen += [k, v, mask, cache.decode_attention(layer, queries(len(mask)), return_lse=True)]
    return plain(seen)


def _next_pass(cache):
    cache.start_forward(numkv.Batch([5, 6, 3], [0, 0, 1]))


_CELLS = {
    "start_forward": lambda c: c.start_forward(numkv.Batch([5, 6, 3], [0, 0, 1])),
    "start_forward of a new sequence": lambda c: c.start_forward(numkv.Batch([0, 1], [7, 7])),
    "start_forward to reserve": lambda c: c.start_forward(numkv.Batch([5], [0]), reserve=True),
    "put": lambda c: c.put(0, *rows(2, 8)),
    "get": lambda c: c.get(0),
    "decode_attention": lambda c: c.decode_attention(0, queries(2), return_lse=True),
    "attention_weights": lambda c: c.attention_weights(0, queries(2)),
    "remove the end": lambda c: c.remove(0, 3),
    "remove": lambda c: c.remove(0, 1, 3),
    "compact": lambda c: c.compact(1, [0, 2]),
    "copy_prefix": lambda c: c.copy_prefix(0, 5, 4),
    "can_resume": lambda c: c.can_resume(0, 5),
    "positions": lambda c: c.positions(0),
    "arrays": lambda c: c.arrays(0),
    "put after start_forward": (_next_pass, lambda c: c.put(0, *rows(3, 8))),
}
_SET_CAUSAL = {"set_causal": lambda c: c.set_causal([1])}


def _encoder():
    cache = numkv.EncoderCache()
    cache.init("int8", 1, 8, 4)
    cache.start_forward(numkv.Batch([0, 1], [0, 0], [1]))
    for layer in range(2):
        cache.put(layer, *rows(5, layer))
    return cache


def _see_encoder(cache):
    seen = [cache.encoder_cached, cache.nbytes, repr(cache)]
    for layer in range(2):
        try:
            rows_of_layer = cache.get(layer)
        except numkv.NumkvError as error:  # there is no pass
            seen.append(str(error))
            continue
        seen += [rows_of_layer, cache.decode_attention(layer, queries(2), return_lse=True)]
    return plain(seen)


_ENCODER = {
    "attention_weights": refused(lambda c: c.attention_weights(0, queries(2))),
    "copy_prefix": refused(lambda c: c.copy_prefix(0, 1, 1)),
    "compact": lambda c: c.compact(0, [0]),
    "start_forward": lambda c: c.start_forward(numkv.Batch([2, 3], [0, 0], [0])),
    "put": lambda c: c.put(0, *rows(5, 8)),
    "put other sizes": lambda c: c.put(0, *rows(7, 8)),
    "get": lambda c: c.get(0),
    "decode_attention": lambda c: c.decode_attention(0, queries(2), return_lse=True),
    "remove": lambda c: c.remove(0, 0),
    "positions": lambda c: c.positions(0),
    "arrays": lambda c: c.arrays(1),
    "can_resume": lambda c: c.can_resume(0, 2),
}


# ---------------------------------------------------------------- functions, and the rest


def _tally():
    tally = numkv.AttentionTally(HEADS)
    tally.add(np.ones((HEADS, 9), F32))
    return tally


_TALLY = {
    "add": lambda t: t.add(np.full((HEADS, 9), 0.5, F32)),
    "add, which grows": lambda t: t.add(np.full((HEADS, 50), 0.5, F32)),
    "compact": lambda t: t.compact([0, 4, 5]),
    "truncate": lambda t: t.truncate(3),
}


def _scaled(make):
    """An empty object of a kind whose heads have scales."""

    def begin():
        it = make()
        it.set_scales(*([0] if isinstance(it, numkv.KVCache) else []), k=0.5)
        return it

    return begin


def _see_scales(it):
    if isinstance(it, numkv.KVCache):
        return plain([x(i) for i in range(2) for x in (it.k_scales, it.v_scales)])
    it = numkv.PagedLayer(1, BLOCK, HEADS, DIM, pool=it) if isinstance(it, numkv.PagedPool) else it
    return plain([it.k_scale, it.v_scale])


_SCALES = {"set_scales": lambda it: it.set_scales(np.full(HEADS, 2, F32), 3.0)}
_SCALES_OF_A_LAYER = {"set_scales": lambda it: it.set_scales(0, np.full(HEADS, 2, F32), 3.0)}

#: Calls of every class that has such a method.
_EVERYWHERE = {
    "copy": lambda subject, it: functools.partial(subject.see, it.copy()),
    "clear": lambda subject, it: it.clear(),
    "reserve": lambda subject, it: it.reserve(8),
    "bind": lambda subject, it: fault_bound.bind(it),
}
#: Methods that need no memory, or make and close objects.
LEFT_OUT = fault_states.LEFT_OUT | {
    "init": "makes the object",
    "lookup": "changes nothing, and asks a store: tests/store/test_network.py",
    "close": "gives memory back",
    "set_config": "keeps its argument",
    "set_layer_type": "keeps its argument",
    "set_scales": "of kinds whose heads have scales: tried on other objects",
    "k_codes": "a view",
    "v_codes": "a view",
    "k_scales": "a view",
    "v_scales": "a view",
    "v": "as k is",
    "decode_values": "tried with decode_keys",
    "quantised_tokens": "a range",
    "length": "a number",
    "cached_len": "a number",
    "count_lookup": "numbers",
    "check": "reads alone",
}

_RESIDUAL = {"full_precision": numkv.FullPrecision(3, 1)}


def _wrapper():
    children = numkv.CausalCache(window_left=3, shift=_SHIFT), numkv.CausalCache(shift=_SHIFT)
    return numkv.WrapperCache(*children, layer_types=[0, 1, 0])


def _subjects():
    found = {}

    def add(name, of, make, see, calls):
        subject = Subject(make, see, dict(calls), of)
        if of is not None:
            for method, call in _EVERYWHERE.items():
                if hasattr(of, method) and method not in calls and of is not numkv.Step:
                    subject.calls[method] = functools.partial(call, subject)
        found[f"{of.__name__} {name}".strip() if of else name] = subject

    of = numkv.KVCache
    for name, kind, options in (
        ("fp32", "fp32", {}), ("int8", "int8", {}), ("int8, residual", "int8", _RESIDUAL),
        ("fp32, rotated", "fp32", {"rotate": True}),
    ):  # fmt: skip
        bound = {} if options == _RESIDUAL else fault_bound.of_cache(_level)
        add(name, of, _kv_cache(kind, **options), _see_kv_cache, _KV_CACHE | bound)
    for name, kind, options in (
        ("fp32", "fp32", {}), ("int8", "int8", {}), ("int8, residual", "int8", _RESIDUAL),
    ):  # fmt: skip
        longer, bound = ({}, {}) if options else (_LONGER, fault_bound.OF_LAYER)
        make, paged = _contiguous_layer(kind, **options), _paged_layer(kind, **options)
        add(name, numkv.ContiguousLayer, make, _see_layer, _LAYER | bound)
        add(name, numkv.PagedLayer, paged, _see_layer, _PAGED_LAYER | longer | bound)
    for name, kind, windows in (("fp32", "fp32", None), ("int8, windows", "int8", [-1, 3])):
        make = _paged_cache(kind, windows)
        add(name, numkv.PagedKVCache, make, _see_paged_cache, _PAGED_CACHE)
        calls = _STEP | fault_bound.OF_STEP | fault_sparse.OF_STEP
        add(name, numkv.Step, functools.partial(_with_step, make), _see_step, calls)
    make = _paged_cache("int8", full_precision=numkv.FullPrecision(2, 1))
    calls = {name: _PAGED_CACHE[name] for name in _IN_FULL if name in _PAGED_CACHE}
    add("int8, residual", numkv.PagedKVCache, make, _see_paged_cache, calls | _NOT_IN_FULL)
    make, calls = functools.partial(_with_step, make), {x: _STEP[x] for x in _IN_FULL if x in _STEP}
    calls |= _NOT_IN_STEPS
    add("int8, residual", numkv.Step, make, _see_step, calls)
    add("states", numkv.PagedKVCache, fault_states.cache, fault_states.see, fault_states.CALLS)
    add("", BlockPool, _block_pool, _see_block_pool, _BLOCK_POOL)
    for name, options, kind in (
        ("", {}, "fp32"), ("int8", {}, "int8"),
        ("window", {"window_left": 3}, "fp32"), ("chunks", {"chunk_size": 4}, "fp32"),
    ):  # fmt: skip
        make = _cells(functools.partial(numkv.CausalCache, _SHIFT, **options), kind)
        add(name, numkv.CausalCache, make, _see_cells, _CELLS | _SET_CAUSAL)
    add("", numkv.WrapperCache, _cells(_wrapper), _see_cells, _CELLS)
    add("", numkv.EncoderCache, _encoder, _see_encoder, _ENCODER)
    for name, of, make, calls in fault_compressors.SUBJECTS:
        add(name, of, make, fault_compressors.see, calls)
    add("", numkv.AttentionTally, _tally, lambda t: plain([len(t), t.weights]), _TALLY)
    add("functions over blocks", None, Arrays, see_arrays, PAGED)
    add("functions over int8 blocks", None, lambda: Arrays("int8"), see_arrays, PAGED)
    add("files", None, Folder, see_folder, FILES)
    add("functions over caches", None, Arrays, see_arrays, CONTIGUOUS)
    for of, sizes, calls in (
        (numkv.KVCache, (2, HEADS, DIM), _SCALES_OF_A_LAYER),
        (numkv.ContiguousLayer, (8, HEADS, DIM), _SCALES),
        (numkv.PagedPool, (8, BLOCK, HEADS, DIM), _SCALES),
    ):
        make = _scaled(functools.partial(of, *sizes, kind="fp8_e4m3"))
        found[f"{of.__name__} fp8, empty"] = Subject(make, _see_scales, calls, None)
    return found


#: Subjects by name.
SUBJECTS = _subjects() | fault_channels.SUBJECTS | fault_latents.SUBJECTS | fault_sparse.SUBJECTS
