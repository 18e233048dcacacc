"""A program that uses numkv as users do, under ``mypy --strict``: `mypy` of pyproject.toml checks it.

It is never run: it checks the types that numkv's annotations give.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, assert_type

import numpy as np
from numpy.typing import NDArray

import numkv
from numkv.blocks import BlockPool, BlocksRemoved, BlocksStored
from numkv.planning import ModelNeeds, needs_of
from numkv.store import PrefixStore, StoreStats

Rows = NDArray[np.float32]


def one_sequence(k: Rows, v: Rows, q: Rows) -> numkv.KVCache:
    cache = numkv.KVCache(
        2, 4, 64, kind="int8", max_seq_len=100, full_precision=numkv.FullPrecision(8)
    )
    for layer in range(cache.num_layers):
        cache.append(layer, k, v)
        out = cache.decode_attention(layer, q)
        assert_type(out, Any)
    cache.advance(len(k))
    assert_type(len(cache), int)
    assert_type(cache.nbytes, int)
    assert_type(cache.copy(), numkv.KVCache)
    bound = cache.bind(num_q_heads=16)
    assert_type(bound, numkv.BoundAttention)
    return cache


def many_sequences(prompt: list[int], k: Rows, v: Rows, q: Rows, folder: Path) -> dict[int, int]:
    with PrefixStore(folder, mark={"model": "mine"}) as store:
        cache = numkv.PagedKVCache(1, 4, 64, num_blocks=32, store=store)
        seq = cache.add(prompt, extra={"adapter": 7})
        assert_type(seq, int)
        try:
            step = cache.reserve([seq], [len(prompt) - cache.cached_len(seq)])
        except numkv.CacheFull as error:
            raise SystemExit(str(error)) from None
        assert_type(step, numkv.Step)
        step.append(0, k, v)
        step.attention(0, q, return_lse=True)
        cache.commit(step, token_ids=prompt)
        fork = cache.fork(seq)
        assert_type(cache.swap_out(fork), numkv.SwappedSequence)
        assert_type(cache.stats(), numkv.PagedStats)
        assert_type(store.stats(), StoreStats)
        return {s: cache.length(s) for s in cache.sequences}


def cells(shift: Any, k: Rows, v: Rows) -> None:
    with numkv.CausalCache(shift=shift) as cache:
        cache.init("fp16", max_sequences=2, capacity=64, max_batch=8)
        cache.start_forward(numkv.Batch(positions=[0], sequences=[0]))
        cache.put(0, k, v)
        assert_type(cache.positions(0), NDArray[np.int32])
        cache.remove(0, 0)


def functions(q: Rows, k: Rows, v: Rows, path: Path) -> None:
    numkv.prefill_attention(q, k, v, [5], [0, 5], window_left=3)
    kind = numkv.kind("int4")
    assert_type(kind, numkv.Kind)
    assert_type(kind.bytes_per_token(2, 64), int)
    numkv.save(path, one_sequence(k, v, q), mark={"model": "mine"})
    numkv.show(numkv.load(path))
    with numkv.num_threads(1):
        assert_type(numkv.get_num_threads(), int)
    keep = numkv.compaction.first_and_recent(100, 4, 60)
    numkv.ContiguousLayer(100, 2, 64).compact(keep)


def heard(event: BlocksStored | BlocksRemoved) -> None:
    print(event)


def management(config: dict[str, Any]) -> int | None:
    pool = BlockPool(64, 16, on_event=heard)
    pool.check()
    needs = needs_of(config)
    assert_type(needs, ModelNeeds)
    return needs.tokens_in(8 << 30, "int8", "fp16")
