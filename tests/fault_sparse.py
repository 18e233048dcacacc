"""Sparse reading in steps in the test of memory that runs out; see `fault_subjects`."""

from fault_base import BLOCK, DIM, HEADS, Subject, plain, queries, refused, rows
from layer_lists import in_full, paged_kv_cache

#: Calls of a step of a cache without bounds.
OF_STEP = {
    "sparse_attention": refused(lambda c: c.step.sparse_attention(0, queries(5), most_blocks=2))
}


def _cache(**options):
    options = {"kind": "fp32"} | options
    cache = paged_kv_cache(
        1, HEADS, DIM, num_blocks=32, block_size=BLOCK, key_bounds=True, **options
    )
    for tokens in (9, 5):
        step = cache.reserve([cache.add()], [tokens])
        step.append(0, *rows(tokens))
        cache.commit(step)
    cache.fork(0)
    cache.step = cache.reserve([1, 2], [3, 2])
    cache.step.append(0, *rows(5, 9))
    return cache


def _see(cache):
    cache.check()
    seen = cache.step.sparse_attention(0, queries(5), most_blocks=3, return_lse=True)
    return plain([cache.num_free, [cache.length(seq) for seq in cache.sequences], seen])


def _read(**options):
    return lambda c: c.step.sparse_attention(0, queries(5), most_blocks=3, **options)


_CALLS = {
    "sparse_attention": _read(),
    "with its lse": _read(return_lse=True, first=0),
    "with sinks": _read(sinks=[0.5, 1.0, -1.0, 0.0]),
    "append again": lambda c: c.step.append(0, *rows(5, 9)),
}

SUBJECTS = {
    "a step that reads sparsely": Subject(_cache, _see, _CALLS, None),
    "a step that reads codes sparsely": Subject(
        lambda: _cache(kind="int8", full_precision=in_full(2, 1)), _see, _CALLS, None
    ),
}
