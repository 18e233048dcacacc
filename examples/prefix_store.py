"""Prefixes that outlive a process: a second one finds on disk what the first one has computed.

python examples/prefix_store.py
"""

import tempfile
import time

import numpy as np

import numkv
from numkv.store import PrefixStore

LAYERS, KV_HEADS, DIM = 4, 2, 64


def serve(store, prompt):
    """What a process does with a prompt; returns how many tokens it found, and how long the look took."""
    cache = numkv.PagedKVCache(
        LAYERS, KV_HEADS, DIM, num_blocks=256, block_size=16, kind="int8", store=store
    )
    begin = time.perf_counter()
    seq = cache.add(prompt)  # looks into the pool, memory of the host, the store
    seconds = time.perf_counter() - begin
    found = cache.cached_len(seq)
    step = cache.reserve([seq], [len(prompt) - found])
    rows = np.ones((2, len(prompt) - found, KV_HEADS, DIM), np.float32)
    for layer in range(LAYERS):
        step.append(layer, *rows)
    cache.commit(step, token_ids=prompt[found:])  # full blocks are written by a thread of the store
    return found, seconds


def main(tokens=1000):
    prompt = np.arange(tokens)
    with tempfile.TemporaryDirectory() as folder:
        for process in ("first", "second"):  # the store object stands for a process here
            store = PrefixStore(
                folder,
                mark={"model": "mine", "revision": 3},
                rope={"base": 1e6},
                max_nbytes=1 << 30,
            )
            with store:
                found, seconds = serve(store, prompt)
                print(
                    f"{process} process: found {found:,} of {tokens:,} tokens in {seconds * 1e3:.1f} ms"
                )
                assert store.flush() == 0  # all that was committed is in the store
                print(f"  {store.stats()}")
    return found


if __name__ == "__main__":
    main()
