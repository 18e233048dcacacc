"""Filled caches of every class, and all that a caller can see of them, for tests of files."""

import numpy as np
from layer_lists import paged_kv_cache

import numkv
from numkv import targets

HEADS, DIM = 2, 32


def random(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def rows(n, target, dim=DIM, seed=0):
    return targets.get(target).asarray(random(n, HEADS, dim, seed=seed))


def query(n, target, heads=2 * HEADS):
    return targets.get(target).asarray(random(n, heads, DIM, seed=9))


def on_host(x, target):
    return None if x is None else np.array(targets.get(target).to_host(x))


# ---------------------------------------------------------------- one sequence


def kv_cache(target, pending=True, **options):
    """Eleven tokens in two layers, of which ten have been advanced past."""
    cache = numkv.KVCache(2, HEADS, DIM, target=target, **options)
    if options.get("kind", "").startswith("fp8"):
        cache.set_scales(1, k=np.array([0.5, 0.25], np.float32))
    for layer in range(2):
        for n in (4, 6, 1)[: 3 if pending else 2]:
            seed = 10 * layer + n
            cache.append(
                layer,
                rows(n, target, seed=seed),
                rows(n, target, cache.layers[0].head_dim_v, seed + 5),
            )
    cache.advance(10)
    return cache


def layer(cls, target, n=13, **options):
    sizes = (24,) if cls is numkv.ContiguousLayer else (6, 4)
    made = cls(*sizes, HEADS, DIM, target=target, **options)
    if options.get("kind", "").startswith("fp8"):
        made.set_scales(v=0.5)
    for part in (n - 1, 1) if n else ():
        made.append(rows(part, target, seed=part), rows(part, target, seed=part + 5))
    return made


# ---------------------------------------------------------------- many sequences


def paged_cache(target, **options):
    """Three sequences: one is a fork, one was continued, and two have known token ids."""
    cache = paged_kv_cache(
        2, HEADS, DIM, num_blocks=40, block_size=4, target=target, **options
    )  # fmt: skip
    if options.get("kind", "").startswith("fp8"):
        cache.set_scales(1, k=0.5)
    cache.add(), cache.remove(0)  # numbers have a gap
    a, b = cache.add(extra={"adapter": 7, "salt": b"\x00\xff"}), cache.add()
    grow(cache, [a, b], [9, 6], target, np.arange(15))
    c = cache.fork(a)
    grow(cache, [c], [3], target)
    return cache


def grow(cache, seqs, lens, target, tokens=None):
    step = cache.reserve(seqs, lens)
    for at in range(2):
        step.append(at, rows(sum(lens), target, seed=at), rows(sum(lens), target, seed=at + 7))
    cache.commit(step, token_ids=tokens)


def multi(cache, target, passes=((5, 2), (2, 1), (1, 0)), **options):
    """Passes over two sequences, of which one has a prefix of the other."""
    one = isinstance(cache, numkv.EncoderCache) or (
        isinstance(cache, numkv.WrapperCache)
        and any(isinstance(x, numkv.EncoderCache) for x in cache.caches)
    )
    options = {"kind": "int8"} | options
    cache.init(options.pop("kind"), 1 if one else 3, 16, 8, target, **options)
    at = [0, 0]
    for i, (n, m) in enumerate(passes):
        m = 0 if one else m
        positions = [*range(at[0], at[0] + n), *range(at[1], at[1] + m)]
        cache.start_forward(numkv.Batch(positions, [7] * n + [3] * m))
        for number in range(2):
            k, v = (rows(n + m, target, seed=10 * i + number + s) for s in (0, 5))
            cache.put(number, k, v)
        at = [at[0] + n, at[1] + m]
    if not one:
        cache.copy_prefix(7, 11, 4)
    return cache


def compressor(target, cls=numkv.MultiHeadCompressor, n=5, **options):
    config = numkv.CompressorConfig(DIM, **options)
    if cls is numkv.HeadCompressor:
        made = cls(config, target=target)
        x, y = (rows(n + 2, target, seed=s)[:, 0] for s in (0, 5))
        x, y = (targets.get(target).asarray(on_host(z, target).copy()) for z in (x, y))
    else:
        made = cls(HEADS, config, num_q_heads=2 * HEADS, target=target)
        x, y = (rows(n + 2, target, seed=s) for s in (0, 5))
    made.extend(x, y)
    if hasattr(made, "evict_outside_window"):
        made.evict_outside_window(n)
    return made


def paged_compressor(target, **options):
    config = numkv.CompressorConfig(DIM, **options)
    made = numkv.PagedCompressor(HEADS, config, num_q_heads=2 * HEADS, target=target)
    for _ in range(3):
        made.add()
    made.extend([0, 2], *(rows(7, target, seed=s) for s in (0, 5)), [5, 2])
    made.extend([made.fork(2)], *(rows(1, target, seed=s) for s in (1, 6)))
    made.fork(0)
    made.remove(2)
    return made


def shift():
    angles = np.arange(64)[:, None] / 100.0 ** (np.arange(DIM // 2) / (DIM // 2))
    return numkv.rope_shift(np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32))


#: By name: what makes a cache on a target.
CACHES = {
    "KVCache fp32": lambda t: kv_cache(t, kind="fp32"),
    "KVCache int4/bf16": lambda t: kv_cache(t, k_kind="int4", v_kind="bf16", head_dim_v=64),
    "KVCache int8 residual": lambda t: kv_cache(t, kind="int8", full_precision=numkv.FullPrecision(3, 2)),
    "KVCache int8 rotated, bounded": lambda t: kv_cache(t, kind="int8", rotate=True, max_seq_len=20),
    "KVCache fp8": lambda t: kv_cache(t, kind="fp8_e4m3"),
    "KVCache empty": lambda t: numkv.KVCache(2, HEADS, DIM, kind="int8", target=t),
    "ContiguousLayer fp16": lambda t: layer(numkv.ContiguousLayer, t, kind="fp16"),
    "ContiguousLayer fp8": lambda t: layer(numkv.ContiguousLayer, t, kind="fp8_e4m3"),
    "ContiguousLayer int4 residual": lambda t: layer(
        numkv.ContiguousLayer, t, kind="int4", full_precision=numkv.FullPrecision(5)
    ),
    "PagedLayer int8": lambda t: layer(numkv.PagedLayer, t, kind="int8"),
    "PagedLayer int8 residual": lambda t: layer(
        numkv.PagedLayer, t, kind="int8", full_precision=numkv.FullPrecision(3, 1)
    ),
    "PagedLayer empty": lambda t: layer(numkv.PagedLayer, t, n=0, kind="fp32"),
    "PagedKVCache int8": lambda t: paged_cache(t, kind="int8"),
    "PagedKVCache windows": lambda t: paged_cache(t, kind="int4", windows=[-1, 4], rotate=True),
    "PagedKVCache fp8": lambda t: paged_cache(t, kind="fp8_e4m3", windows=[-1, 4]),
    "PagedKVCache empty": lambda t: numkv.PagedKVCache(2, HEADS, DIM, num_blocks=3, target=t),
    "CausalCache int8": lambda t: multi(numkv.CausalCache(shift()), t),
    "CausalCache fp8": lambda t: scaled(numkv.CausalCache(), t),
    "CausalCache window int4": lambda t: multi(numkv.CausalCache(window_left=2, memory=3), t, kind="int4"),
    "CausalCache chunks fp32": lambda t: multi(numkv.CausalCache(chunk_size=4), t, kind="fp32", rotate=True),
    "EncoderCache int8": lambda t: multi(numkv.EncoderCache(), t),
    "WrapperCache": lambda t: multi(
        numkv.WrapperCache(numkv.CausalCache(window_left=2), numkv.CausalCache(shift()), layer_types=[0, 1]), t
    ),
    "HeadCompressor": lambda t: compressor(t, numkv.HeadCompressor, bits=3),
    "MultiHeadCompressor sketch": lambda t: compressor(t, bits=4, projections=20, seed=5),
    "MultiHeadCompressor values": lambda t: compressor(t, bits=4, v_bits=3),
    "PagedCompressor": lambda t: paged_compressor(t, bits=4, projections=20, v_bits=3),
    "MultiHeadCompressor empty": lambda t: numkv.MultiHeadCompressor(
        HEADS, numkv.CompressorConfig(DIM), num_q_heads=2 * HEADS, target=t
    ),
}  # fmt: skip


def scaled(cache, target):
    """Scales of heads that were set, of one layer that is put and of one that never is."""
    cache.init("fp8_e4m3", 3, 16, 8, target)
    cache.set_scales(0, k=0.5, v=np.array([0.25, 2], np.float32))
    cache.set_scales(4, v=0.125)
    cache.start_forward(numkv.Batch([0, 1, 0], [7, 7, 3]))
    for number in range(2):
        cache.put(number, rows(3, target, seed=number), rows(3, target, seed=number + 5))
    return cache


# ---------------------------------------------------------------- all that can be seen


def seen(cache, target):
    """Return all that a caller sees of a cache, as arrays and numbers; changes nothing that is stored."""
    return list(_SEEN[type(cache).__name__](cache, target))


def _of_kv_cache(cache, target):
    yield from (
        len(cache),
        cache.max_seq_len,
        cache.layers[:1],
    )
    for at in range(cache.num_layers):
        yield cache.quantised_tokens(at)
        for read in (cache.k, cache.v):
            yield on_host(read(at), target)
        if len(cache):
            yield on_host(cache.decode_attention(at, query(1, target)), target)
        for name in ("k_scales", "v_scales"):
            kind = cache.layers[at].kind if name[0] == "k" else cache.layers[at].v_kind
            if kind.is_scaled:
                yield on_host(getattr(cache, name)(at), target)


def _of_layer(cache, target):
    yield from (
        cache.seq_len,
        cache.capacity,
        cache.spec,
        cache.quantised_tokens,
    )
    yield on_host(cache.decode_attention(query(1, target)), target)
    part = cache.quantised_tokens if cache.spec.kind.has_scales else range(cache.seq_len)
    size = cache.block_size or max(1, cache.capacity)
    table = np.array(cache.block_indices or [0])
    for buffer in (cache.k, cache.v, cache.k_scale, cache.v_scale):
        x = on_host(buffer, target)
        if x.ndim >= 3 and x.size:
            yield np.stack([x[table[p // size], :, p % size] for p in part]) if len(part) else None
        else:
            yield x


def _of_paged_cache(cache, target):
    cache.check()
    yield from (cache.sequences, cache.num_blocks, cache.num_free, cache.layers, cache.block_size)
    for seq in cache.sequences:
        yield cache.length(seq)
        yield cache.cached_len(seq)
        swapped = cache.swap_out(seq)
        yield from (swapped.tokens, swapped.extra, swapped.geometry, swapped.starts)
        yield from swapped.logical
        yield from (x for scales in swapped.head_scales for x in scales)
        for at in range(cache.num_layers):
            yield on_host(cache.decode_attention(at, [seq], query(1, target)), target)


def _of_cells(cache, target):
    yield from (cache.num_cells, cache.num_free, cache.sequences, cache.layers)
    yield [cache.positions(seq).tolist() for seq in cache.sequences]
    yield from _next_pass(cache, target)


def _next_pass(cache, target):
    """Make a pass that writes the same tokens to each cache."""
    cache.start_forward(numkv.Batch([8], [7]))
    for at in range(2):
        if type(cache).__name__ != "EncoderCache":
            cache.put(at, rows(1, target, seed=30), rows(1, target, seed=31))
        yield from (on_host(x, target) for x in cache.get(at))
        yield on_host(cache.decode_attention(at, query(1, target)), target)
    yield repr(cache)


def _of_encoder(cache, target):
    yield cache.encoder_cached
    yield from _next_pass(cache, target)


def _of_wrapper(cache, target):
    yield from (len(cache.caches), cache.can_resume(7, 8))
    yield from _next_pass(cache, target)


def _of_compressor(cache, target):
    yield from (len(cache), cache.config, repr(cache).split(", nbytes")[0])
    yield on_host(cache.decode_keys(), target)
    yield on_host(cache.decode_values(), target)
    one = type(cache).__name__ == "HeadCompressor"
    q = random(DIM) if one else random(2 * HEADS, DIM)
    q = targets.get(target).asarray(q)
    yield on_host(cache.attention_scores(q), target)
    yield on_host(cache.attend(q), target)


def _of_paged_compressor(cache, target):
    yield from (cache.sequences, cache.config, cache.bytes_per_token)
    for seq in cache.sequences:
        yield cache.length(seq)
        for x in (*cache.key_codes(seq), *cache.value_codes(seq)):
            yield on_host(x, target)
    q = targets.get(target).asarray(random(len(cache), 2 * HEADS, DIM))
    yield on_host(cache.attend(cache.sequences, q), target)
    made = cache.add()
    cache.extend([made, cache.sequences[0]], *(rows(2, target, seed=s) for s in (2, 7)))
    yield (made, on_host(cache.attend(cache.sequences[-1:], q[:1]), target).tobytes())
    cache.check()


_SEEN = {
    "KVCache": _of_kv_cache,
    "ContiguousLayer": _of_layer,
    "PagedLayer": _of_layer,
    "PagedKVCache": _of_paged_cache,
    "CausalCache": _of_cells,
    "EncoderCache": _of_encoder,
    "WrapperCache": _of_wrapper,
    "HeadCompressor": _of_compressor,
    "MultiHeadCompressor": _of_compressor,
    "PagedCompressor": _of_paged_compressor,
}


def same(a, b):
    """Whether two lists of what was seen are equal, to the bit."""
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        if isinstance(x, np.ndarray):
            assert x.dtype == y.dtype
            assert x.shape == y.shape
            assert x.tobytes() == y.tobytes()
        else:
            assert x == y
    return True
