"""Sparse reading: bounds of keys, chosen blocks, and attention over them, against plain NumPy in float64."""

import naive
import numpy as np
import paged_problems
import problems
import pytest

import numkv
from numkv import sparse

F32 = np.float32
SHAPE = problems.Shape(4, 2, 32, (50, 7, 0, 33))
SIZE = 4


def stored(rng, kind, shape=SHAPE):
    """A paged problem, and the values of its keys ``(num_blocks, num_kv_heads, block_size, head_dim)``."""
    paged = paged_problems.make(rng, shape, kind, block_size=SIZE)
    k = paged.k_pool if paged.k_scale is None else naive.dequantise(paged.k_pool, paged.k_scale)
    return paged, np.asarray(k, np.float64)


def used(paged):
    """Blocks of each sequence with the tokens in each."""
    table = paged.block_table
    for b, n in enumerate(paged.problem.seq_lens):
        for j in range(-(-int(n) // SIZE)):
            yield b, j, int(table[b, j]), min(SIZE, int(n) - j * SIZE)


def bounds_of(paged, to, target):
    found = [(block, count) for _, _, block, count in used(paged)]
    blocks, counts = (np.array(x) for x in zip(*found, strict=True))
    num_blocks, heads = paged.k_pool.shape[:2]
    bounds = sparse.KeyBounds(num_blocks, heads, paged.problem.q.shape[2], target=target)
    scale = None if paged.k_scale is None else to(paged.k_scale)
    bounds.update(to(paged.k_pool), to(blocks), to(counts), k_scale=scale)
    return bounds


def naive_scores(paged, k, scale):
    p, heads = paged.problem, k.shape[1]
    out = np.full((len(p.seq_lens), heads, paged.block_table.shape[1]), -np.inf)
    q = p.q.astype(np.float64).reshape(len(p.seq_lens), heads, -1, p.q.shape[2]) * scale
    for b, j, block, count in used(paged):
        rows = k[block, :, :count]
        low, high = rows.min(1)[:, None], rows.max(1)[:, None]
        out[b, :, j] = np.maximum(q[b] * low, q[b] * high).sum(-1).max(-1)
    return out


@pytest.mark.boundscheck
@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8", "int4"])
def test_bounds_and_scores(target, to, host, rng, kind):
    """No score of a key is above the bound of its block, and the bound is that of its columns."""
    paged, k = stored(rng, kind)
    bounds = bounds_of(paged, to, target)
    low, high = host(bounds.low), host(bounds.high)
    for _, _, block, count in used(paged):
        rows = k[block, :, :count]
        np.testing.assert_allclose(low[block], rows.min(1), rtol=1e-6)
        np.testing.assert_allclose(high[block], rows.max(1), rtol=1e-6)
    p = paged.problem
    for scale in (0.3, -0.3):
        got = host(
            bounds.scores(to(p.q), to(paged.block_table), to(p.seq_lens), SIZE, sm_scale=scale)
        )
        np.testing.assert_allclose(got, naive_scores(paged, k, scale), rtol=1e-4, atol=1e-4)


def test_what_was_never_updated_is_not_chosen(target, host):
    bounds = sparse.KeyBounds(2, 1, 3, target=target)
    assert (host(bounds.low) == np.inf).all()
    assert (host(bounds.high) == -np.inf).all()
    assert bounds.nbytes == 2 * 2 * 3 * 4


def test_nan_is_read_rather_than_left_out(target, to, host, rng):
    """Dense attention would give NaN; a choice that left the block out would hide it."""
    k = rng.standard_normal((3, 1, SIZE, 8)).astype(F32)
    k[1, 0, 2, 5] = np.nan
    bounds = sparse.KeyBounds(3, 1, 8, target=target)
    bounds.update(to(k), to(np.arange(3)), to(np.array([4, 4, 4])))
    q = rng.standard_normal((1, 2, 8)).astype(F32)
    table = to(np.arange(3, dtype=np.int32)[None])
    got = host(bounds.scores(to(q), table, to(np.array([12])), SIZE))
    assert got[0, 0, 1] == np.inf
    assert np.isfinite(got[0, 0, [0, 2]]).all()
    bounds.update(to(k), to(np.array([1])), to(np.array([2])))  # the rows before it alone
    assert np.isfinite(host(bounds.scores(to(q), table, to(np.array([6])), SIZE))[0, 0, :2]).all()


def naive_choice(scores, table, lens, top, first, newest):
    tables = np.full((*scores.shape[:2], min(top, table.shape[1])), -1)
    tokens = np.zeros(scores.shape[:2], int)
    for b, n in enumerate(lens):
        blocks = -(-int(n) // SIZE)
        for h in range(scores.shape[1]):
            chosen = set(range(blocks))
            if blocks > top:
                chosen = {*range(first), *range(blocks - newest, blocks)}
                rest = [(-s, j) for j, s in enumerate(scores[b, h, :blocks]) if j not in chosen]
                chosen |= {j for _, j in sorted(rest)[: top - len(chosen)]}
            tables[b, h, : len(chosen)] = table[b, sorted(chosen)]
            tokens[b, h] = len(chosen) * SIZE - (blocks * SIZE - n)
    return tables, tokens


@pytest.mark.boundscheck
@pytest.mark.parametrize(
    ("top", "first", "newest"), [(2, 1, 1), (5, 1, 1), (5, 0, 1), (7, 2, 3), (40, 1, 1)]
)
def test_the_best_are_chosen(target, to, host, rng, top, first, newest):
    """Among equal scores the earlier block; scores of all signs, zeros, infinities."""
    lens = np.array([0, 1, 37, 149, 160])
    table = rng.permutation(200).astype(np.int32).reshape(5, 40)
    scores = np.round(rng.standard_normal((5, 2, 40)) * 3).astype(F32) / 2
    scores[2, 0, 3], scores[3, 1, 7:9], scores[4, 0, :] = np.inf, -np.inf, 0.25
    scores[4, 1, ::2] *= -0.0
    got = sparse.choose_blocks(
        to(scores), to(table), to(lens), SIZE, top, first=first, newest=newest
    )
    tables, tokens = naive_choice(scores, table, lens, top, first, newest)
    assert host(got.tables).tolist() == tables.tolist()
    assert host(got.seq_lens).tolist() == tokens.tolist()


@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8", "int4"])
def test_attention_over_a_choice_is_exact(target, to, host, rng, kind):
    paged, k = stored(rng, kind)
    v = paged.v_pool if paged.v_scale is None else naive.dequantise(paged.v_pool, paged.v_scale)
    p = paged.problem
    scores = rng.standard_normal((4, 2, paged.block_table.shape[1])).astype(F32)
    choice = sparse.choose_blocks(to(scores), to(paged.block_table), to(p.seq_lens), SIZE, 4)
    scales = {"k_scale": paged.k_scale, "v_scale": paged.v_scale}
    out, lse = sparse.sparse_decode_attention(
        to(p.q), to(paged.k_pool), to(paged.v_pool), *choice, return_lse=True, logits_soft_cap=4.0,
        **{n: None if x is None else to(x) for n, x in scales.items()},
    )  # fmt: skip
    tables, tokens = host(choice.tables), host(choice.seq_lens)
    for b in range(4):
        for h in range(2):
            rows = [
                x[tables[b, h][tables[b, h] >= 0], h]
                .reshape(1, 1, -1, x.shape[3])[:, :, : tokens[b, h]].astype(np.float64)
                for x in (k, v)
            ]  # fmt: skip
            want, want_lse = naive.attention(
                p.q[b : b + 1, 2 * h : 2 * h + 2], *rows, tokens[b, h : h + 1], logits_soft_cap=4.0
            )
            np.testing.assert_allclose(
                host(out)[b, 2 * h : 2 * h + 2], want[0], rtol=3e-3, atol=3e-3
            )
            np.testing.assert_allclose(
                host(lse)[b, 2 * h : 2 * h + 2], want_lse[0], rtol=3e-3, atol=3e-3
            )


def test_all_blocks_give_what_attention_gives(target, to, host, rng):
    """To the bit on the CPU: parts of blocks are rows of the same pool."""
    paged, _ = stored(rng, "fp32")
    p = paged.problem
    scores = np.zeros((4, 2, paged.block_table.shape[1]), F32)
    choice = sparse.choose_blocks(to(scores), to(paged.block_table), to(p.seq_lens), SIZE, 99)
    got = host(sparse.sparse_decode_attention(to(p.q), to(paged.k_pool), to(paged.v_pool), *choice))
    want = host(
        numkv.paged_decode_attention(
            to(p.q), to(paged.k_pool), to(paged.v_pool), to(paged.block_table), to(p.seq_lens)
        )
    )
    assert np.array_equal(got, want) if target == "cpu" else np.allclose(got, want, atol=1e-6)


def test_heads_with_blocks_of_their_own(target, to, host, rng):
    """Heads that have kept different tokens, in pools of one kv head: another head uses what one has given back."""
    k, v = (rng.standard_normal((8, 1, SIZE, 16)).astype(F32) for _ in range(2))
    tables = np.array([[[5, 2, 7, -1], [0, -1, -1, -1]], [[1, 3, -1, -1], [4, 6, 9, 9]]], np.int32)
    lens = np.array([[11, 3], [8, 5]])
    q = rng.standard_normal((2, 6, 16)).astype(F32)
    got = host(sparse.sparse_decode_attention(to(q), to(k), to(v), to(tables), to(lens)))
    for b, h in np.ndindex(2, 2):
        n = int(lens[b, h])
        rows = [x[tables[b, h, : -(-n // SIZE)], 0].reshape(1, 1, -1, 16)[:, :, :n] for x in (k, v)]
        want, _ = naive.attention(q[b : b + 1, 3 * h : 3 * h + 3], *rows, lens[b, h : h + 1])
        np.testing.assert_allclose(got[b, 3 * h : 3 * h + 3], want[0], rtol=1e-5, atol=1e-5)


def test_chosen_tokens(target, to, host, rng):
    k, v = (rng.standard_normal((6, 2, SIZE, 16)).astype(F32) for _ in range(2))
    k[5], v[5] = np.nan, np.nan
    slots = np.array([[3, 17, 9, 0, -1], [12, 23, 23, 23, 23], [1, 2, 3, 4, 5]], np.int32)
    counts, q = np.array([4, 1, 0]), rng.standard_normal((3, 4, 16)).astype(F32)
    sinks = rng.standard_normal(4).astype(F32)
    out, lse = sparse.token_decode_attention(
        to(q), to(k), to(v), to(slots), to(counts), sinks=to(sinks), return_lse=True
    )
    for b, n in enumerate(counts):
        rows = [
            x.swapaxes(1, 2).reshape(-1, 2, 16)[slots[b, :n]].swapaxes(0, 1)[None] for x in (k, v)
        ]
        want, want_lse = naive.attention(q[b : b + 1], *rows, counts[b : b + 1], sinks=sinks)
        np.testing.assert_allclose(host(out)[b], want[0], rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(host(lse)[b], want_lse[0], rtol=1e-5, atol=1e-5)


def test_results_do_not_depend_on_the_batch(target, to, host, rng):
    paged, _ = stored(rng, "bf16")
    p, bounds = paged.problem, bounds_of(paged, to, target)

    def sparse_out(rows):
        q, table, lens = (
            to(p.q[rows].copy()),
            to(paged.block_table[rows].copy()),
            to(p.seq_lens[rows]),
        )
        scores = bounds.scores(q, table, lens, SIZE)
        choice = sparse.choose_blocks(scores, table, lens, SIZE, 3)
        return host(sparse.sparse_decode_attention(q, to(paged.k_pool), to(paged.v_pool), *choice))

    whole = sparse_out([0, 1, 2, 3])
    for b in range(4):
        assert np.array_equal(sparse_out([b])[0], whole[b])


def test_out_and_strides(target, to, host, rng):
    paged, _ = stored(rng, "fp32")
    p, k, v = paged.problem, to(paged.k_pool), to(paged.v_pool)
    tables = to(np.repeat(paged.block_table[:, None], 2, 1).copy())
    lens = to(np.repeat(p.seq_lens[:, None], 2, 1).copy())
    want = host(sparse.sparse_decode_attention(to(p.q), k, v, tables, lens))
    out = to(np.full_like(p.q, 7))
    assert sparse.sparse_decode_attention(to(p.q), k, v, tables, lens, out=out) is out
    assert np.array_equal(host(out), want)
    wide = np.full((4, 8, 32), 7, F32)
    strided = to(wide)[:, ::2]
    if target == "cpu":
        q = np.repeat(p.q, 2, 1)[:, ::2]
        assert sparse.sparse_decode_attention(q, k, v, tables, lens, out=strided) is strided
        assert np.array_equal(strided, want)
        assert (wide[:, 1::2] == 7).all()
    else:
        with pytest.raises(numkv.NotSupported, match="out"):
            sparse.sparse_decode_attention(to(p.q), k, v, tables, lens, out=strided)


def test_out_has_memory_of_its_own(rng):
    """What is read stays as it is, where the result is copied into a strided array too."""
    paged, _ = stored(rng, "fp32", problems.Shape(4, 2, 4, (9, 3)))
    before = paged.v_pool.copy()
    flat = paged.v_pool.reshape(-1)
    strided = np.lib.stride_tricks.as_strided(flat, (2, 4, 4), (128, 32, 4))
    for out in (flat[:32].reshape(2, 4, 4), strided):
        with pytest.raises(numkv.NotSupported, match="out"):
            bad(paged, out=out, seq_lens=np.array([[9, 9], [3, 3]]))
        np.testing.assert_array_equal(paged.v_pool, before)


def bad(paged, **changed):
    p = paged.problem
    given = {
        "q": p.q, "k_pool": paged.k_pool, "v_pool": paged.v_pool,
        "tables": np.repeat(paged.block_table[:, None], 2, 1),
        "seq_lens": np.repeat(p.seq_lens[:, None], 2, 1),
    } | changed  # fmt: skip
    return sparse.sparse_decode_attention(**given)


def test_what_is_refused(rng):
    paged, _ = stored(rng, "fp32")
    k = paged.k_pool
    tables = np.repeat(paged.block_table[:, None], 2, 1)
    with pytest.raises(IndexError, match="tables"):
        bad(paged, tables=np.full_like(tables, 10**6))
    with pytest.raises(IndexError, match="seq_lens"):
        bad(paged, seq_lens=np.full((4, 2), 10**4))
    with pytest.raises(numkv.DimensionMismatch, match="tables"):
        bad(paged, tables=tables[:, [0, 0, 1]], seq_lens=np.zeros((4, 3), int))
    with pytest.raises(numkv.NotSupported, match="in one piece"):
        bad(paged, k_pool=np.repeat(k, 2, 1)[:, ::2])
    with pytest.raises(numkv.NotSupported, match="scales of heads"):
        bad(paged, k_scale=np.ones(2, F32))
    lens, table = paged.problem.seq_lens, paged.block_table
    scores = np.zeros((4, 2, table.shape[1]), F32)
    with pytest.raises(numkv.DimensionMismatch, match="top"):
        sparse.choose_blocks(scores, table, lens, SIZE, 3, first=2, newest=2)
    with pytest.raises(numkv.DimensionMismatch, match="scores"):
        sparse.choose_blocks(scores[:, :, 1:], table, lens, SIZE, 3)
    bounds = sparse.KeyBounds(3, 2, 32)
    with pytest.raises(numkv.DimensionMismatch, match="k_pool"):
        bounds.update(k, [0], [1])
    with pytest.raises(IndexError, match="block_table"):
        bounds.scores(paged.problem.q, table, lens, SIZE)
    whole = sparse.KeyBounds(*k.shape[:2], 32)
    for blocks, counts, name in (([k.shape[0]], [1], "blocks"), ([0], [SIZE + 1], "counts")):
        with pytest.raises(IndexError, match=name):
            whole.update(k, blocks, counts)
    with pytest.raises(IndexError, match=r"slots\[0\]"):
        sparse.token_decode_attention(
            paged.problem.q[:1], k, k, np.full((1, 2), k.shape[0] * SIZE, np.int32), [1]
        )


def test_scores_are_those_of_the_tightest_choice(rng):
    """Chosen by the bound, most of the softmax is in few blocks: what sparse reading is for."""
    heads, tokens, dim, size = 2, 4096, 64, 16
    k = rng.standard_normal((tokens // size, heads, size, dim)).astype(F32)
    v = rng.standard_normal(k.shape).astype(F32)
    q = rng.standard_normal((1, 4, dim)).astype(F32) * 0.5
    for h, t in ((0, 1000), (1, 3001)):  # what these heads look for
        k[t // size, h, t % size] = 9 * q[0, 2 * h] + 0.1 * k[t // size, h, t % size]
    bounds = sparse.KeyBounds(*k.shape[:2], dim)
    bounds.update(k, np.arange(len(k)), np.full(len(k), size))
    table = np.arange(len(k), dtype=np.int32)[None]
    scores = bounds.scores(q, table, [tokens], size)
    choice = sparse.choose_blocks(scores, table, [tokens], size, 16)
    assert 1000 // size in choice.tables[0, 0]
    assert 3001 // size in choice.tables[0, 1]
    _, whole = numkv.paged_decode_attention(q, k, v, table, [tokens], return_lse=True)
    _, part = sparse.sparse_decode_attention(q, k, v, *choice, return_lse=True)
    assert (np.exp(part - whole)[0, ::2] > 0.9).all()
