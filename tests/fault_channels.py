"""Caches with keys by channel, for the test of memory that runs out: groups are completed, cut and compacted."""

from fault_base import DIM, FUSED, HEADS, TABLES, Subject, plain, projections, queries, rows

import numkv

_SHIFT = numkv.rope_shift(*TABLES)
_KEPT = [*range(30), *range(60, 130)]  # moves by less than there are positions in the tables


def _kv_cache():
    full = numkv.FullPrecision(num_sink_tokens=3)
    cache = numkv.KVCache(2, HEADS, DIM, k_kind="int8_channel", v_kind="int8", full_precision=full)
    for layer in range(2):
        cache.append(layer, *rows(130, layer))
    cache.advance(130)
    return cache


def _see_kv_cache(cache):
    seen = [[cache.k(i), cache.v(i), cache.quantised_tokens(i)] for i in range(2)]
    cache.check()
    return plain([len(cache), seen, cache.decode_attention(0, queries(3), return_lse=True)])


# Not `key_error`: NumPy itself crashes where memory runs out while it converts an array of bfloat16.
_KV_CACHE = {
    "append": lambda c: c.append(1, *rows(70, 7)),
    "truncate": lambda c: c.truncate(40),
    "append after truncate": (lambda c: c.truncate(40), lambda c: c.append(0, *rows(30, 7))),
    "compact": lambda c: c.compact(_KEPT, _SHIFT),
    "compact without a shift": lambda c: c.compact([*range(70), *range(90, 130)]),
    "attention_weights": lambda c: c.attention_weights(0, queries(3)),
    "copy": lambda c: c.copy(),
}


def _layer():
    layer = numkv.PagedLayer(12, 64, HEADS, DIM, kind="int8_channel")
    layer.append(*rows(130))
    return layer


def _see_layer(layer):
    layer.check()
    seen = [layer.seq_len, list(layer.quantised_tokens), len(layer.block_indices)]
    return plain([*seen, layer.decode_attention(queries(3), return_lse=True)])


_LAYER = {
    "append": lambda c: c.append(*rows(70, 7)),
    "write": (lambda c: c.truncate(58), lambda c: c.write(projections(6), **FUSED)),
    "compact": lambda c: c.compact(_KEPT, _SHIFT),
}


def _paged_cache():
    cache = numkv.PagedKVCache(2, HEADS, DIM, num_blocks=40, block_size=64, kind="int8_channel")
    seq = cache.add()
    _written(cache, seq, 130)
    cache.commit(cache.step)
    cache.fork(seq)
    return cache


def _written(cache, seq=0, tokens=70):
    cache.step = cache.reserve([seq], [tokens])
    for layer in range(2):
        cache.step.append(layer, *rows(tokens, layer))


def _see_paged_cache(cache):
    cache.check()
    seqs = list(cache.sequences)
    lengths = [cache.length(seq) for seq in seqs]
    q = queries(len(seqs))
    seen = [cache.decode_attention(layer, seqs, q, return_lse=True) for layer in range(2)]
    return plain([seqs, lengths, cache.num_free, seen])


_PAGED_CACHE = {
    "commit": (_written, lambda c: c.commit(c.step)),
    "commit what was accepted": (_written, lambda c: c.commit(c.step, [3])),
    "rollback": (_written, lambda c: c.rollback(c.step)),
    "compact": lambda c: c.compact(0, _KEPT, _SHIFT),
    "compact without a shift": lambda c: c.compact(1, [*range(70), *range(90, 130)]),
    "truncate": lambda c: c.truncate(0, 100),
}

#: By name; the methods that are not here are tried on caches of other kinds.
SUBJECTS = {
    "KVCache int8_channel, first tokens": Subject(_kv_cache, _see_kv_cache, _KV_CACHE, None),
    "PagedLayer int8_channel": Subject(_layer, _see_layer, _LAYER, None),
    "PagedKVCache int8_channel": Subject(_paged_cache, _see_paged_cache, _PAGED_CACHE, None),
}
