"""Public functions with arrays of their own, for the table in `fault_subjects.py`."""

import functools
import shutil
import tempfile
import weakref
from pathlib import Path

import numpy as np
from fault_base import BLOCK, DIM, F32, FUSED, HEADS, Q_HEADS, plain, projections, queries, rows

import numkv


class Arrays:
    """Arguments of functions."""

    def __init__(self, kind="fp32"):
        layer = numkv.PagedLayer(8, BLOCK, HEADS, DIM, kind=kind)
        layer.append(*rows(13))
        self.k, self.v, self.table = layer.k, layer.v, layer.block_table[None].copy()
        self.scales = {}
        if numkv.kind(kind).has_scales:
            self.scales = {"k_scale": layer.k_scale, "v_scale": layer.v_scale}
        self.cache = [np.ascontiguousarray(x.transpose(1, 0, 2))[None] for x in rows(13, 3)]
        self.out = np.full((1, Q_HEADS, DIM), 5, F32)


def see_arrays(it):
    return plain([it.k, it.v, list(it.scales.values()), it.cache, it.out])


PAGED = {
    "paged_append": lambda a: numkv.paged_append(
        *rows(3, 7), a.k, a.v, [0, 14, -1], **a.scales
    ),
    "paged_write": lambda a: numkv.paged_write(
        projections(3), a.k, a.v, [0, 14, -1], positions=[1, 2, 3], **FUSED, **a.scales
    ),
    "paged_decode_attention": lambda a: numkv.paged_decode_attention(
        queries(1), a.k, a.v, a.table, [13], return_lse=True, out=a.out, **a.scales
    ),
    "paged_prefill_attention": lambda a: numkv.paged_prefill_attention(
        queries(5), a.k, a.v, a.table, [13], [0, 5], **a.scales
    ),
}  # fmt: skip
CONTIGUOUS = {
    "decode_attention": lambda a: numkv.decode_attention(queries(1), *a.cache, [13], out=a.out),
    "decode_attention in bf16": lambda a: numkv.decode_attention(
        queries(1).astype(numkv.kind("bf16").dtype), *a.cache, [13], window_left=5, logits_soft_cap=3.0
    ),
    "prefill_attention": lambda a: numkv.prefill_attention(
        queries(5), *a.cache, [13], [0, 5], sinks=np.ones(Q_HEADS, F32)
    ),
    "attention_weights": lambda a: numkv.attention_weights(queries(1), a.cache[0], [13]),
    "merge_states": lambda a: numkv.merge_states(
        *[queries(2), queries(2)[:, :, 0].copy()] * 2
    ),
    "append": lambda a: numkv.append(
        *(x[:, :, :2].copy() for x in a.cache), *a.cache, np.array([3])
    ),
    "AppendPlan.run": lambda a: _plan().run(
        numkv.AppendArgs(*(x[:, :, :2].copy() for x in a.cache), *a.cache, np.array([3]))
    ),
}  # fmt: skip


def _plan():
    return numkv.AppendPlan.select(numkv.AppendDescriptor(1, HEADS, 2, 13, DIM, DIM, "fp32"))


#: A folder in memory where there is one, so that no disk is waited for.
_IN_MEMORY = Path("/dev/shm")


class Folder:
    """Two caches, one of them in a file too."""

    def __init__(self):
        self.path = Path(tempfile.mkdtemp(dir=_IN_MEMORY if _IN_MEMORY.is_dir() else None))
        weakref.finalize(self, shutil.rmtree, self.path)
        self.caches = [numkv.KVCache(1, HEADS, DIM, kind="int8") for _ in range(2)]
        for n, cache in zip((3, 5), self.caches, strict=True):
            cache.append(0, *rows(n))
            cache.advance(n)
        numkv.save(self.path / "a", self.caches[0])


def see_folder(it):
    files = [(path.name, path.read_bytes()) for path in sorted(it.path.iterdir())]
    return plain([files, [_rows_of(cache) for cache in it.caches]])


def _rows_of(cache):
    return plain([len(cache), cache.k(0), cache.v(0)])


def _load(it):
    try:
        return functools.partial(_rows_of, numkv.load(it.path / "a"))
    except numkv.NumkvError as error:  # it says for what there was not enough memory
        if "there is not enough memory" not in str(error):
            raise
        raise MemoryError from error


FILES = {
    "save": lambda it: numkv.save(it.path / "b", it.caches[1]),
    "save over another": lambda it: numkv.save(it.path / "a", it.caches[1]),
    "load": _load,
}
