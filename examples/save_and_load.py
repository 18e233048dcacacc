"""Save a cache and go on from it, and move one sequence out of a pool and into another.

python examples/save_and_load.py
"""

import tempfile
from pathlib import Path

import numpy as np

import numkv

LAYERS, KV_HEADS, DIM = 2, 2, 64
MODEL = {"model": "mine", "revision": 3, "rope_theta": 1e6}  # whatever K and V depend on


def rows(n):
    return np.random.default_rng(n).standard_normal((2, n, KV_HEADS, DIM), dtype=np.float32)


def main(tokens=100):
    with tempfile.TemporaryDirectory() as folder:
        # A whole cache: written beside the old file, then renamed over it.
        path = Path(folder) / "prompt.kv"
        cache = numkv.KVCache(LAYERS, KV_HEADS, DIM, kind="int8")
        for layer in range(LAYERS):
            cache.append(layer, *rows(tokens))
        cache.advance(tokens)
        numkv.save(path, cache, mark=MODEL)
        again = numkv.load(path, mark=MODEL)
        assert np.array_equal(again.k_codes(0), cache.k_codes(0))  # bit for bit
        print(f"{path.name}: {path.stat().st_size:,} bytes for {len(again)} tokens")

        try:  # another model's rows are not taken for one's own
            numkv.load(path, mark=MODEL | {"revision": 4})
        except numkv.NotSupported as error:
            print(f"refused: {str(error).replace(folder, '...')}")

        # One sequence of many: swapped out, saved, and swapped in elsewhere.
        pool = numkv.PagedKVCache(LAYERS, KV_HEADS, DIM, num_blocks=16, kind="int8")
        seq = pool.add()
        step = pool.reserve([seq], [tokens])
        for layer in range(LAYERS):
            step.append(layer, *rows(tokens))
        pool.commit(step, token_ids=np.arange(tokens))
        numkv.save(path, pool.swap_out(seq), mark=MODEL)
        pool.remove(seq)
        other = numkv.PagedKVCache(LAYERS, KV_HEADS, DIM, num_blocks=32, kind="int8")
        seq = other.swap_in(numkv.load(path, mark=MODEL))
        print(f"sequence {seq} is there again, with {other.length(seq)} tokens:")
        numkv.show(other)
    return again, other


if __name__ == "__main__":
    main()
