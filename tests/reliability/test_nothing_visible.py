"""Sequences without tokens, of one and of a whole block, in every call that takes from a caller what queries see.

Pools lie between rows of NaN, rows that nobody has written are NaN, and unused entries of tables name what lies before
the pool: who reads a row that no query sees shows it. What sees nothing gives 0 and -inf.
"""

from types import SimpleNamespace

import naive
import numpy as np
import pytest
import tolerances

import numkv
from numkv import sparse

BLOCK, HEADS, Q_HEADS, DIM = 4, 2, 4, 16
LENS = np.array([0, 1, BLOCK, 0])
F32 = np.float32
SLOPES = (2.0 ** -np.arange(1.0, 1 + Q_HEADS)).astype(F32)
RANGES = np.array([(-(2**63), 2**63 - 1), (-5, -1), (0, 9), (0, 1)])
MASK = np.array([[1, 0], [0xFFFFFFFF] * 2] * 2, np.uint32)
ALONE = {"parents": np.full(len(LENS), -1)}  # what `MASK` says of one query for each sequence
#: Options of a decode, and what the oracle is given beside those that it knows.
SIGHTS = {
    "all": ({}, {}),
    "window": ({"window_left": 0}, {}),
    "later too": ({"window_left": 2, "causal": False}, {}),
    "ranges": ({"ranges": RANGES}, {}),
    "slopes": ({"alibi_slopes": SLOPES}, {"slopes": SLOPES}),
    "mask": ({"mask": MASK}, ALONE),
    "mask, window": ({"mask": MASK, "window_left": 1}, ALONE),
    "mask, slopes": ({"mask": MASK, "alibi_slopes": SLOPES}, ALONE | {"slopes": SLOPES}),
}
#: The same for prefills: where queries start, and options. Queries that are tokens are none where there are no tokens.
PREFILLS = {
    "all": ([0, 0, 1, 5, 5], {}, {}),
    "mask": (
        [0, 0, 1, 5, 5], {"mask": np.array([[1], [1], [3], [5], [9]], np.uint32)},
        {"parents": np.array([-1, -1, 0, 0, 0])},
    ),
    "ranges": ([0, 2, 3, 8, 9], {"ranges": np.resize(RANGES, (9, 2))}, {}),
    "later too": ([0, 2, 3, 8, 9], {"causal": False}, {}),
}  # fmt: skip


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(F32)


def hidden(x, seen):
    """Rows with what no query may see in place of the others."""
    return np.where(seen.reshape(seen.shape + (1,) * (x.ndim - seen.ndim)), x, _secret(x)).astype(
        x.dtype
    )


def _secret(x):
    return np.nan if x.dtype.kind == "f" else 99


def between_guards(to, x):
    """An array on the target, between rows that nobody may read."""
    guard = np.full((3, *x.shape[1:]), _secret(x), x.dtype)
    return to(np.concatenate([guard, x, guard]))[3 : 3 + len(x)]


def stored(rng, kind):
    """Sequences of `LENS` as they are in pools of blocks, the first and the last nobody's, and what these hold.

    A sequence has a block in the same place of `values`, K's and V's, contiguous.
    """
    table = np.full((len(LENS), 3), -(2**31), np.int32)
    table[:, 1] = -1
    table[1:3, 0] = [2, 1]
    seen = np.zeros((4, HEADS, BLOCK), bool)
    seen[2, :, :1] = seen[1] = True
    pools, scales, values = [], {}, []
    for name in "kv":
        rows = normal(rng, *seen.shape, DIM)
        if kind == "int8":
            rows, scale = naive.quantise(rows, kind)
            scales[f"{name}_scale"] = hidden(scale, seen)
        pools.append(hidden(rows, seen))
        exact = naive.dequantise(rows, scale) if kind == "int8" else rows
        values.append(exact[np.maximum(table[:, 0], 0)])
    return SimpleNamespace(table=table, pools=pools, scales=scales, values=values, kind=kind)


def on_target(to, rows, contiguous=False):
    """Pools and scales, or buffers of one block for each sequence."""
    take = np.maximum(rows.table[:, 0], 0) if contiguous else slice(None)
    pools = [between_guards(to, x[take]) for x in rows.pools]
    return pools, {n: between_guards(to, x[take]) for n, x in rows.scales.items()}


def check(host, got, want, kind="fp32"):
    bound = tolerances.attention(kind, "fp32")
    tolerances.assert_rows_close(host(got[0]), want[0], bound)
    tolerances.assert_lse_close(host(got[1]), want[1], max(bound, tolerances.LSE))


def expected(rows, q, starts, options, oracle, lens=LENS):
    known = {n: x for n, x in options.items() if n in ("window_left", "causal", "ranges")}
    return naive.attention_to_seen(q, *rows.values, lens, starts, **known, **oracle)


def placed(to, options):
    return {n: to(x) if isinstance(x, np.ndarray) else x for n, x in options.items()}


every_kind = pytest.mark.parametrize("kind", ["fp32", "int8"])


@every_kind
@pytest.mark.parametrize("sight", SIGHTS)
def test_decode(target, to, host, rng, kind, sight):
    rows, q, (options, oracle) = (
        stored(rng, kind),
        normal(rng, len(LENS), Q_HEADS, DIM),
        SIGHTS[sight],
    )
    want = expected(rows, q, np.arange(len(LENS) + 1), options, oracle)
    asked = placed(to, options) | {"return_lse": True}
    pools, scales = on_target(to, rows)
    got = numkv.paged_decode_attention(to(q), *pools, to(rows.table), to(LENS), **asked, **scales)
    check(host, got, want, kind)
    pools, scales = on_target(to, rows, contiguous=True)
    check(host, numkv.decode_attention(to(q), *pools, to(LENS), **asked, **scales), want, kind)


@every_kind
@pytest.mark.parametrize("sight", PREFILLS)
def test_prefill(target, to, host, rng, kind, sight):
    rows, (starts, options, oracle) = stored(rng, kind), PREFILLS[sight]
    q = normal(rng, starts[-1], Q_HEADS, DIM)
    want = expected(rows, q, starts, options, oracle)
    asked, of = placed(to, options) | {"return_lse": True}, (to(LENS), to(np.array(starts)))
    pools, scales = on_target(to, rows)
    got = numkv.paged_prefill_attention(to(q), *pools, to(rows.table), *of, **asked, **scales)
    check(host, got, want, kind)
    pools, scales = on_target(to, rows, contiguous=True)
    check(host, numkv.prefill_attention(to(q), *pools, *of, **asked, **scales), want, kind)


@every_kind
def test_a_prefix_of_a_whole_block(target, to, host, rng, kind):
    """Shared by sequences that end with it but for a token; others have no tokens and no queries."""
    rows = stored(rng, kind)
    rows.table[:] = rows.table[2]
    pools, scales = on_target(to, rows)
    rows.values = [x[[2] * 4] for x in rows.values]
    for shared, lens, starts in (
        (0, [0, 1, BLOCK, 0], [0, 0, 1, 3, 3]),
        (3, [BLOCK, 0, 0, BLOCK], [0, 1, 1, 1, 2]),
    ):
        q = normal(rng, starts[-1], Q_HEADS, DIM)
        got = numkv.cascade_attention(
            to(q), *pools, to(rows.table), to(np.array(lens)), shared, to(np.array(starts)), return_lse=True, **scales
        )  # fmt: skip
        check(host, got, expected(rows, q, starts, {}, {}, lens), kind)


@every_kind
def test_chosen_blocks_and_tokens(target, to, host, rng, kind):
    """Heads of which one sees nothing, and one a block; tokens by their slots."""
    rows, q = stored(rng, kind), normal(rng, len(LENS), Q_HEADS, DIM)
    pools, scales = on_target(to, rows)
    lens = np.stack([LENS, LENS[::-1]], axis=1)
    tables = np.stack([rows.table, rows.table[::-1]], axis=1)
    got = sparse.sparse_decode_attention(
        to(q), *pools, to(tables), to(lens), return_lse=True, **scales
    )
    want = []
    for h, order in enumerate((slice(None), slice(None, None, -1))):
        k, v = (x[order, h : h + 1] for x in rows.values)
        want.append(naive.attention(q[:, 2 * h : 2 * h + 2], k, v, LENS[order]))
    check(host, got, [np.concatenate(pair, axis=1) for pair in zip(*want, strict=True)], kind)

    slots = np.full((len(LENS), BLOCK + 1), -(2**31), np.int32)
    for s, n in enumerate(LENS):
        slots[s, :n] = int(rows.table[s, 0]) * BLOCK + np.arange(n)
    got = sparse.token_decode_attention(
        to(q), *pools, to(slots), to(LENS), return_lse=True, **scales
    )
    check(host, got, naive.attention(q, *rows.values, LENS), kind)


def test_choices_and_bounds(target, to, host, rng):
    """Of what has no tokens no block is chosen, and no key bounds it."""
    rows, q = stored(rng, "fp32"), normal(rng, len(LENS), Q_HEADS, DIM)
    (k, v), _ = on_target(to, rows)
    table, lens = to(rows.table), to(LENS)
    bounds = sparse.KeyBounds(len(rows.pools[0]), HEADS, DIM, target=target)
    bounds.update(k, to(np.array([2, 1, 0], np.int32)), to(np.array([1, BLOCK, 0])))
    scores = bounds.scores(to(q), table, lens, BLOCK)
    choice = sparse.choose_blocks(scores, table, lens, BLOCK, 2)
    assert host(choice.seq_lens).tolist() == [[n, n] for n in LENS]
    assert host(choice.tables)[:, 0, 0].tolist() == [-1, 2, 1, -1]
    got = sparse.sparse_decode_attention(to(q), k, v, *choice, return_lse=True)
    check(host, got, naive.attention(q, *rows.values, LENS))


@every_kind
@pytest.mark.parametrize("window", [-1, 0])
def test_weights(target, to, host, rng, kind, window):
    rows, q = stored(rng, kind), normal(rng, len(LENS), Q_HEADS, DIM)
    (k, _), scales = on_target(to, rows, contiguous=True)
    starts = np.arange(len(LENS) + 1)
    got = numkv.attention_weights(
        to(q), k, to(LENS), window_left=window, k_scale=scales.get("k_scale")
    )
    want = naive.attention_weights(q, rows.values[0], LENS, starts, window_left=window)
    tolerances.assert_weights_close(host(got), want, kind)


def layers(target):
    """Empty caches of one sequence, with NaN in every row."""
    latent = {"v_kind": "latent", "head_dim_v": DIM}
    made = {
        "ContiguousLayer": numkv.ContiguousLayer(2 * BLOCK, HEADS, DIM, kind="fp32", target=target),
        "PagedLayer": numkv.PagedLayer(3, BLOCK, HEADS, DIM, kind="fp32", target=target),
        "KVCache": numkv.KVCache(1, HEADS, DIM, max_seq_len=2 * BLOCK, target=target),
        "latents": numkv.PagedLayer(3, BLOCK, 1, DIM, kind="fp32", target=target, **latent),
    }
    for cache in made.values():
        arrays = cache.arrays(0) if isinstance(cache, numkv.KVCache) else cache.arrays
        for x in (arrays.k, arrays.v):
            x[:] = np.full(x.shape, np.nan, F32)
    return made


SIGHTS_OF_ONE = (
    {},
    {"window_left": 0},
    {"mask": MASK[1:2]},
    {"mask": MASK[:1], "window_left": 0},
    {"ranges": RANGES[:1]},
)


@pytest.mark.parametrize("which", ["ContiguousLayer", "PagedLayer", "KVCache", "latents"])
def test_caches(target, to, host, rng, which):
    """Of no token, one, and a whole block."""
    cache = layers(target)[which]
    of = (0,) if which == "KVCache" else ()
    k, v, q = (
        normal(rng, BLOCK, HEADS, DIM),
        normal(rng, BLOCK, HEADS, DIM),
        normal(rng, 1, Q_HEADS, DIM),
    )
    if which == "latents":
        v = k = k[:, :1]
    for length, new in ((0, 0), (1, 1), (BLOCK, BLOCK - 1)):
        if new:
            rows = [to(x[length - new : length]) for x in ((k,) if which == "latents" else (k, v))]
            cache.append(*of, *rows)
            if of:
                cache.advance()
        for options in SIGHTS_OF_ONE:
            got = cache.decode_attention(*of, to(q), return_lse=True, **placed(to, options))
            known = {n: x for n, x in options.items() if n != "mask"}
            oracle = {"parents": [-1]} if "mask" in options else {}
            values = [x.swapaxes(0, 1)[None] for x in (k, v)]
            check(
                host, got, naive.attention_to_seen(q, *values, [length], [0, 1], **known, **oracle)
            )
        weights = host(cache.attention_weights(*of, to(q)))
        want = naive.attention_weights(q, k.swapaxes(0, 1)[None], [length], [0, 1])[0, :, :length]
        tolerances.assert_weights_close(weights, want, "fp32")


def test_paged_cache(target, to, host, rng):
    """Sequences of no token, one and a block in one call; then bound calls, each with one token more."""
    cache = numkv.PagedKVCache(
        1, HEADS, DIM, num_blocks=8, block_size=BLOCK, kind="fp32", target=target
    )
    arrays = cache.arrays(0)
    for x in (arrays.k, arrays.v):
        x[:] = np.full(x.shape, np.nan, F32)
    seqs = [cache.add() for _ in LENS]
    k, v = (
        normal(rng, len(LENS), HEADS, BLOCK + 1, DIM),
        normal(rng, len(LENS), HEADS, BLOCK + 1, DIM),
    )
    rows = SimpleNamespace(values=(k, v))
    step = cache.reserve(seqs, LENS)
    step.append(
        0,
        *(
            to(np.concatenate([x[s, :, :n].swapaxes(0, 1) for s, n in enumerate(LENS)]))
            for x in (k, v)
        ),
    )
    cache.commit(step)
    for sight in ("all", "later too", "ranges", "mask", "mask, slopes"):
        options, oracle = SIGHTS[sight]
        options = {n: x for n, x in options.items() if n != "window_left"}
        q = normal(rng, len(LENS), Q_HEADS, DIM)
        got = cache.decode_attention(0, seqs, to(q), return_lse=True, **placed(to, options))
        check(host, got, expected(rows, q, np.arange(5), options, oracle))
    for s, seq in enumerate(seqs):
        own = q[:0] if LENS[s] == 0 else q[s : s + 1]
        weights = host(cache.attention_weights(0, seq, to(own)))
        rows_of_k = k[s : s + 1, :, : LENS[s]]
        want = naive.attention_weights(own, rows_of_k, LENS[s : s + 1], [0, len(own)])[0]
        tolerances.assert_weights_close(weights, want, "fp32")

    step = cache.reserve(seqs, 1)
    new = [np.stack([x[s, :, n] for s, n in enumerate(LENS)]) for x in (k, v)]
    out = cache.bind(Q_HEADS, "fp32").begin(step)(0, to(q), *map(to, new))
    want = naive.attention(q, k, v, LENS + 1)[0]
    tolerances.assert_rows_close(host(out), want, tolerances.attention("fp32", "fp32"))
    cache.commit(step)
