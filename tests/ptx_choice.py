"""Cases of sparse reading for `ptx_cases`: bounds of keys, scores of blocks, and what is chosen by them."""

import naive
import numpy as np
import paged_problems
from problems import Shape

from numkv import sparse, targets

SIZE = 4


def to(x):
    return targets.get("cuda").asarray(x)


def host(x):
    return targets.get("cuda").to_host(x)


def bounds(rng, kind, dim):
    """Of the keys as they are stored, over the rows that count; then the bound of a query with each block."""
    paged = paged_problems.make(rng, Shape(4, 2, dim, (13, 6)), kind, block_size=SIZE)
    p, table = paged.problem, paged.block_table
    k = paged.k_pool if paged.k_scale is None else naive.dequantise(paged.k_pool, paged.k_scale)
    found = sparse.KeyBounds(*k.shape[:2], dim, target="cuda")
    seen = [
        (b, j, int(table[b, j]), min(SIZE, n - j * SIZE))
        for b, n in enumerate((13, 6))
        for j in range(-(-n // SIZE))
    ]
    numbers, counts = (np.array([row[i] for row in seen]) for i in (2, 3))
    scale = None if paged.k_scale is None else to(paged.k_scale)
    found.update(to(paged.k_pool), to(numbers), to(counts), k_scale=scale)
    scores = host(found.scores(to(p.q), to(table), to(p.seq_lens), SIZE, sm_scale=0.5))
    low, high = host(found.low), host(found.high)
    for b, j, block, count in seen:
        rows = k[block, :, :count].astype(np.float64)
        np.testing.assert_allclose(low[block], rows.min(1), rtol=1e-6)
        np.testing.assert_allclose(high[block], rows.max(1), rtol=1e-6)
        q = p.q[b].astype(np.float64).reshape(2, 2, dim) / 2
        most = np.maximum(q * rows.min(1)[:, None], q * rows.max(1)[:, None]).sum(-1).max(-1)
        np.testing.assert_allclose(scores[b, :, j], most, rtol=1e-4, atol=1e-4)
    assert (scores[1, :, 2:] == -np.inf).all()


def choice(rng, top):
    """The best blocks, of equal ones the earlier; and the same blocks as parts of a pool."""
    lens, columns = np.array([0, 700, 1021]), 256
    table = rng.permutation(3 * columns).astype(np.int32).reshape(3, columns)
    scores = (np.round(rng.standard_normal((3, 2, columns)) * 4) / 4).astype(np.float32)
    got = sparse.choose_blocks(to(scores), to(table), to(lens), SIZE, top)
    tables, tokens = host(got.tables), host(got.seq_lens)
    for b, h in np.ndindex(3, 2):
        blocks = -(-int(lens[b]) // SIZE)
        rest = sorted((-scores[b, h, j], j) for j in range(1, blocks - 1))[: top - 2]
        chosen = sorted({*range(blocks)} & {0, blocks - 1, *(j for _, j in rest)})
        assert tables[b, h].tolist() == [*table[b, chosen], *[-1] * (top - len(chosen))]
        assert tokens[b, h] == len(chosen) * SIZE - (blocks * SIZE - lens[b])
    numbered = to(np.zeros((6, top), np.int32))
    targets.get("cuda").ops.tables_of_heads(got.tables, 2, numbered)
    wanted = np.where(tables < 0, -1, tables * 2 + np.arange(2)[None, :, None])
    assert np.array_equal(host(numbered), wanted.reshape(6, top))


def add_cases(case):
    """All of them; `case` is that of `ptx_cases.cases`."""
    case(bounds, "bf16", 24, everyday=True)
    for kind, dim in (("fp32", 7), ("int8", 16), ("int4", 40)):
        case(bounds, kind, dim)
    case(choice, 9, everyday=True)
    case(choice, 2)
