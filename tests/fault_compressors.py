"""Compressed heads in the test of memory that runs out; see `fault_subjects`."""

from fault_base import HEADS, Q_HEADS, plain, queries, rows

import numkv


def _head(projections=None):
    def make():
        head = numkv.HeadCompressor(numkv.CompressorConfig(32, projections=projections))
        head.extend(*(x[:, 0] for x in rows(15, dim=32)))
        return head

    return make


def _heads():
    heads = numkv.MultiHeadCompressor(HEADS, numkv.CompressorConfig(32), num_q_heads=Q_HEADS)
    heads.extend(*rows(15, dim=32))
    return heads


def _paged():
    heads = numkv.PagedCompressor(HEADS, numkv.CompressorConfig(32), num_q_heads=Q_HEADS)
    for _ in range(3):
        heads.add()
    heads.extend([0, 2], *rows(15, dim=32), [11, 4])
    heads.fork(0)
    return heads


def see(it):
    if isinstance(it, numkv.PagedCompressor):
        seen = [len(it), it.sequences, [it.length(seq) for seq in it.sequences]]
        seen += [[it.decode_keys(seq), it.decode_values(seq)] for seq in it.sequences]
        return plain([*seen, it.attend(it.sequences, queries(len(it), Q_HEADS, 32))])
    q = queries(1, getattr(it, "num_q_heads", 1), 32)[0]
    q = q[0] if isinstance(it, numkv.HeadCompressor) else q
    seen = [len(it), it.decode_keys(), it.decode_values()]
    return plain([*seen, it.attention_scores(q), *([it.attend(q)] if len(it) else [])])


def _one_head(n, seed=7):
    return [x[:, 0] for x in rows(n, seed, dim=32)]


_COMPRESSOR = {
    "evict_outside_window": lambda c: c.evict_outside_window(4),
    "truncate": lambda c: c.truncate(9),
    "decode_keys": lambda c: [c.decode_keys(), c.decode_values()],
}
_HEAD = _COMPRESSOR | {
    "push": lambda c: c.push(*(x[0] for x in _one_head(1))),
    "extend": lambda c: c.extend(*_one_head(3)),
    "extend, which grows": lambda c: c.extend(*_one_head(100)),
    "attention_scores": lambda c: c.attention_scores(queries(1, 1, 32)[0, 0]),
    "attend": lambda c: c.attend(queries(1, 1, 32)[0, 0]),
    "attend with two queries": lambda c: c.attend(
        queries(2, 1, 32)[:, 0], window_left=3, return_lse=True
    ),
}
_HEADS = _COMPRESSOR | {
    "push_token": lambda c: c.push_token(*(x[0] for x in rows(1, 7, dim=32))),
    "extend": lambda c: c.extend(*rows(3, 7, dim=32)),
    "extend, which grows": lambda c: c.extend(*rows(100, 7, dim=32)),
    "attention_scores": lambda c: c.attention_scores(queries(1, Q_HEADS, 32)[0]),
    "attend": lambda c: c.attend(queries(1, Q_HEADS, 32)[0]),
    "attend with two queries": lambda c: c.attend(
        queries(2, Q_HEADS, 32), logits_soft_cap=5.0, return_lse=True
    ),
}
_PAGED = {
    "add": lambda c: c.add(),
    "fork": lambda c: c.fork(2),
    "remove": lambda c: c.remove(0),
    "truncate": lambda c: c.truncate(0, 5),
    "length": lambda c: c.length(2),
    "extend": lambda c: c.extend([1, 2], *rows(3, 7, dim=32), [2, 1]),
    "extend a fork": lambda c: c.extend([3, 0], *rows(2, 7, dim=32)),
    "extend, which grows": lambda c: c.extend([2], *rows(200, 7, dim=32), 200),
    "decode_keys": lambda c: c.decode_keys(0),
    "decode_values": lambda c: c.decode_values(2),
    "key_codes": lambda c: [*c.key_codes(0)],
    "value_codes": lambda c: [*c.value_codes(2)],
    "attention_scores": lambda c: c.attention_scores(2, queries(1, Q_HEADS, 32)[0]),
    "attend": lambda c: c.attend(
        [2, 0], queries(3, Q_HEADS, 32), [1, 2], window_left=3, return_lse=True
    ),
}

SUBJECTS = [
    ("", numkv.HeadCompressor, _head(), _HEAD),
    ("with a sketch", numkv.HeadCompressor, _head(32), _HEAD),
    ("", numkv.MultiHeadCompressor, _heads, _HEADS),
    ("", numkv.PagedCompressor, _paged, _PAGED),
]
