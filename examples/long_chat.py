"""A chat that outlives its window: keep the newest tokens within a bound, shift their keys, go on after a restart.

Four first tokens always stay, as attention rests on them (StreamingLLM). Behind them lie the newest `window` tokens at
least. There is room for a small portion more; when it is full, the oldest go, no more of them than must, and the keys
behind the gap get the rotary embedding of their new positions. Nothing is computed again.
"""

import tempfile

import numpy as np

import numkv

LAYERS, KV_HEADS, Q_HEADS, DIM = 4, 4, 16, 64
FIRST = 4
rng = np.random.default_rng(0)


def angles(positions):
    """Cosines and sines of a rotary embedding, (positions, DIM / 2) each."""
    turn = np.arange(positions)[:, None] * 10000.0 ** (-np.arange(DIM // 2) / (DIM // 2))
    return np.cos(turn).astype(np.float32), np.sin(turn).astype(np.float32)


def turn_keys(k, positions, cos, sin):
    """What a model does to its keys before they are stored."""
    a, b = k[..., : DIM // 2], k[..., DIM // 2 :]
    c, s = cos[positions, None], sin[positions, None]
    return np.concatenate([a * c - b * s, b * c + a * s], -1)


def main(window=4096, tokens=6000, most_nbytes=100_000_000):
    part = 64  # a turn of the chat brings some tokens
    room = FIRST + window + max(part, window // 16)
    cos, sin = angles(room)
    shift = numkv.rope_shift(cos, sin)
    cache = numkv.KVCache(LAYERS, KV_HEADS, DIM, kind="int8", max_seq_len=room)
    cache.reserve(room)  # all memory now, none later
    print(f"{cache.nbytes / 1e6:.1f} MB for {room:,} tokens")
    assert cache.nbytes <= most_nbytes

    said = shifts = dropped = 0
    with tempfile.TemporaryDirectory() as folder:
        while said < tokens:
            if (
                len(cache) + part > room
            ):  # with the new ones there are `window` behind the first again
                keep = numkv.compaction.first_and_recent(len(cache), FIRST, window - part)
                dropped += len(cache) - len(keep)
                cache.compact(keep, shift=shift)
                shifts += 1
            positions = np.arange(len(cache), len(cache) + part)
            for layer in range(LAYERS):
                k, v = rng.standard_normal((2, part, KV_HEADS, DIM), dtype=np.float32)
                cache.append(layer, turn_keys(k, positions, cos, sin), v)
                q = rng.standard_normal((part, Q_HEADS, DIM), dtype=np.float32)
                out = cache.decode_attention(layer, turn_keys(q, positions, cos, sin))
                assert np.isfinite(out).all()
            cache.advance(part)
            said += part
            if said == tokens // 2 // part * part:  # the process ends, another one goes on
                numkv.save(f"{folder}/chat", cache, mark={"model": "mine"})
                cache = numkv.load(f"{folder}/chat", mark={"model": "mine"})
                print(f"restarted with {len(cache):,} tokens")
    print(
        f"{said:,} tokens said, {dropped:,} of them dropped in {shifts} shifts, {len(cache):,} in the cache"
    )
    numkv.show(cache)
    return cache


if __name__ == "__main__":
    main()
