"""Cases of attention's CUDA kernel for many query rows, for `ptx_cases`; each row is compared with float64.

Pools are NaN wherever nothing may be read. Some cases have NaN and infinity in rows that only some queries see; these
queries' results are compared too.
"""

import functools
import importlib
from dataclasses import replace

import naive
import numpy as np
import operands
import paged_problems
import tolerances
from problems import Shape

from numkv import targets

attention = importlib.import_module("numkv.kernels.cuda.attention")
F32, I32, I64 = np.float32, np.int32, np.int64
#: A row's relative L2 error beside that of rounding the exact row to the kind of the query, which is up to 2.1e-3 of
#: bfloat16, 2.6e-4 of float16.
BOUNDS = {"fp16": 5e-4, "bf16": 2e-4, "fp32": 5e-5}
ODD = [np.nan, np.inf, -np.inf]


def to(x):
    return targets.get("cuda").asarray(x)


def host(x):
    return targets.get("cuda").to_host(x)


def expected(q, k, v, seen, *, sm_scale, logits_soft_cap=0.0, sinks=None):
    """Rows of float64 and their lse; `seen` says which tokens of its sequence's each query attends to."""
    group = q.shape[1] // k[0].shape[0]
    out = np.zeros((*q.shape[:2], v[0].shape[2]))
    lse = np.zeros(q.shape[:2])
    for i, (s, tokens) in enumerate(seen):
        for h in range(q.shape[1]):
            sink = None if sinks is None else float(sinks[h])
            with np.errstate(invalid="ignore"):
                out[i, h], lse[i, h] = naive.attention_row(
                    q[i, h].astype(np.float64), k[s][h // group, tokens], v[s][h // group, tokens], sm_scale,
                    logits_soft_cap, sink,
                )  # fmt: skip
    return out, lse


def pool_of(rows, table, kind, block_size, by_slot):
    """A pool of NaN with the rows of sequences ``(heads, tokens, dim)`` where the table says."""
    blocks = 1 + int(table.max()) // (block_size if by_slot else 1)
    pool = np.full(
        (blocks, rows[0].shape[0], block_size, rows[0].shape[2]), np.nan, naive.DTYPES[kind]
    )
    for s, x in enumerate(rows):
        for i in range(x.shape[1]):
            slot = (
                table[s, i] if by_slot else table[s, i // block_size] * block_size + i % block_size
            )
            if slot >= 0:
                pool[slot // block_size, :, slot % block_size] = x[:, i].astype(pool.dtype)
    return pool


def table_of(rng, lengths, block_size, by_slot, lost):
    """Shuffled blocks or slots; where tokens are to be `lost`, some of them are in no pool."""
    units = [n if by_slot else -(-n // block_size) for n in lengths]
    order = rng.permutation(sum(units) + 2).astype(I32)
    table = np.full((len(lengths), max(units)), -7, I32)
    for s, n in enumerate(units):
        table[s, :n], order = order[:n], order[n:]
    if lost:
        table[0, units[0] // 2] = -1
        table[0, 1] = 1 << 20
        table[0, units[0] * 7 // 8] = -1
    return table


def prefill(
    rng, shape, k_kind, q_kind, v_kind=None, *, block_size=16, by_slot=False, ranges=False, lost=False, odd=(),
    window_left=-1, sm_scale=None, sinks=False, factor=1.0, **options
):  # fmt: skip
    """Sequences with many queries, and others; `odd` are tokens whose V is not finite, in one column each."""
    v_kind, lengths = v_kind or k_kind, shape.seq_lens
    dim_v = shape.head_dim_v or shape.head_dim
    starts = np.concatenate([[0], np.cumsum(shape.new)])
    q = naive.round_to(
        factor * rng.standard_normal((starts[-1], shape.num_q_heads, shape.head_dim)), q_kind
    )
    k, v = (
        [naive.round_to(rng.standard_normal((shape.num_kv_heads, n, d)), kind) for n in lengths]
        for d, kind in ((shape.head_dim, k_kind), (dim_v, v_kind))
    )
    for i, token in enumerate(odd):
        v[0][:, token, (3 * i) % dim_v] = ODD[i % 3]
        v[0][:, token, (3 * i + 1) % dim_v] = ODD[(i + 1) % 3]
    table = table_of(rng, lengths, block_size, by_slot, lost)
    seen, limits = [], np.zeros((0, 2), I64)
    if ranges:
        limits = np.sort(rng.integers(-3, max(lengths) + 9, (starts[-1], 2)), axis=1).astype(I64)
        limits[5] = limits[5, ::-1]
    capacity = table.shape[1] * (1 if by_slot else block_size)
    for s, n in enumerate(lengths):
        there = np.ones(n, bool)
        if lost and s == 0:
            places = table[0, np.arange(n) // (1 if by_slot else block_size)]
            there = (places >= 0) & (places < (1 << 20))
        for i in range(starts[s], starts[s + 1]):
            position = n - starts[s + 1] + i
            begin, end = 0 if window_left < 0 else max(0, position - window_left), position + 1
            if ranges:
                begin, end = max(limits[i, 0], 0), min(limits[i, 1], capacity, n)
            tokens = np.arange(begin, max(begin, end))
            seen.append((s, tokens[there[tokens]]))
    if ranges:
        limits[:, 1] = np.minimum(limits[:, 1], [lengths[s] for s, _ in seen])  # as callers do
    scale = 1 / np.sqrt(shape.head_dim) if sm_scale is None else sm_scale
    options |= {"sinks": rng.standard_normal(shape.num_q_heads).astype(F32)} if sinks else {}
    sides = []
    for rows, kind in ((k, k_kind), (v, v_kind)):
        pool = operands.words(
            pool_of(
                rows,
                table if not lost else np.where(table < 1 << 20, table, -9),
                kind,
                block_size,
                by_slot,
            )
        )
        sides += [to(pool), kind, to(np.zeros((0, 0, 0), F32))]
    out, lse = (
        to(operands.words(np.zeros((*q.shape[:2], dim_v), q.dtype))),
        to(np.zeros(q.shape[:2], F32)),
    )
    targets.get("cuda").ops.attend(
        to(operands.words(q)), q_kind, *sides, to(table), to(np.array(lengths, I64)), to(starts.astype(I64)),
        to(limits), int(by_slot), scale, options.get("logits_soft_cap", 0.0), window_left,
        to(options.get("sinks", np.zeros(0, F32))), out, lse,
    )  # fmt: skip
    wide = [[x.astype(np.float64) for x in rows] for rows in (k, v)]
    want, want_lse = expected(q, *wide, seen, sm_scale=scale, **options)
    compare(host(out).view(q.dtype), want, BOUNDS[q_kind], v_kind == "bf16")
    tolerances.assert_lse_close(host(lse), want_lse)


def compare(got, want, bound, may_be_nan):
    """Rows within a bound, and what is not finite where and as it should be; or NaN in place of infinity."""
    finite = np.isfinite(want)
    with np.errstate(invalid="ignore"):
        rounded = want.astype(got.dtype).astype(np.float64)
    got = got.astype(np.float64)
    odd, infinite = got[~finite], ~np.isnan(want[~finite])
    if may_be_nan:
        odd = np.where(infinite & np.isnan(odd), want[~finite], odd)
    np.testing.assert_array_equal(odd, want[~finite])

    def size(x):
        return np.linalg.norm(np.where(finite, x, 0), axis=-1)

    with np.errstate(invalid="ignore"):
        errors, own = size(got - want), size(rounded - want)
    assert np.all(errors <= own + bound * size(want)), (
        f"row error {np.nanmax((errors - own) / size(want))} > {bound}"
    )


def alone(rng, shape, kind, q_kind):
    """Each sequence of a batch by itself: the same bits."""
    problem = paged_problems.make(rng, shape, kind, q_kind, block_size=16)
    together = host(problem.run(to))
    starts = problem.problem.cu_seqlens_q
    for s in range(len(shape.seq_lens)):
        found = host(problem.only(s).run(to))
        np.testing.assert_array_equal(
            operands.words(found), operands.words(together[starts[s] : starts[s + 1]])
        )


def lost_codes(rng, shape, kind, q_kind):
    """Blocks that are in no pool, the last one among them: items end with tiles of which tokens are missing."""
    problem = paged_problems.make(rng, shape, kind, q_kind, block_size=16)
    p, (length,) = problem.problem, shape.seq_lens
    rows = []
    for pool, scale in ((problem.k_pool, problem.k_scale), (problem.v_pool, problem.v_scale)):
        codes_, scales = (naive.gather(x, problem.block_table, p.seq_lens) for x in (pool, scale))
        rows.append([naive.dequantise(codes_, scales)[0]])
    there, table = np.ones(length, bool), problem.block_table.copy()
    for block, number in ((1, 1 << 20), (3, -1), ((length - 1) // 16, -1)):
        table[0, block] = number
        there[16 * block : 16 * block + 16] = False
    positions = np.arange(length - len(p.q), length)
    seen = [(0, np.flatnonzero(there[: position + 1])) for position in positions]
    out, lse = (
        host(x) for x in replace(problem, block_table=table).run(to, return_lse=True)
    )  # fmt: skip
    want, want_lse = expected(p.q, *rows, seen, sm_scale=1 / np.sqrt(shape.head_dim))
    compare(out, want, BOUNDS[q_kind], False)
    tolerances.assert_lse_close(lse, want_lse)


def asked():
    """How often the kernel for many query rows has been asked for."""
    info = attention._prefill.cache_info()
    return info.hits + info.misses


def forget_calls():
    """Have calls like earlier ones choose their kernels anew: a case may run again, without one of its barriers."""
    targets.get("cuda")._calls._replays.clear()


def through_prefill(function):
    """Make a case that fails if the kernel for many query rows is not used."""

    @functools.wraps(function)
    def run(*args, **options):
        forget_calls()
        before = asked()
        function(*args, **options)
        assert asked() > before

    run.__name__ = f"prefill_{function.__name__}"
    return run


@through_prefill
def codes(
    rng, shape, kind, q_kind, v_kind=None, *, block_size=16, spread=0, uneven=0, **options
):  # fmt: skip
    """Stored codes; scales of V of some tokens are up to ``10 ** spread`` times others, queries by ``10 ** uneven``."""
    problem = paged_problems.make(rng, shape, kind, q_kind, v_kind=v_kind, block_size=block_size)
    q = problem.problem.q
    powers = 10.0 ** rng.integers(-uneven, 1, (*q.shape[:2], 1))
    q[:] = (q.astype(np.float64) * powers).astype(q.dtype)
    if uneven:
        q[3] = 0
    if problem.v_scale is not None:
        powers = 10.0 ** rng.integers(-spread, 1, problem.v_scale.shape[:3])
        powers = powers.reshape(*powers.shape, *[1] * (problem.v_scale.ndim - 3))
        problem.v_scale[:] = (problem.v_scale * powers).astype(problem.v_scale.dtype)
    if options.pop("sinks", False):
        options["sinks"] = rng.standard_normal(shape.num_q_heads).astype(F32)
    out, lse = (host(x) for x in problem.run(to, return_lse=True, **options))
    want, want_lse = problem.expect(**options)
    # Rows of INT4 are rounded to float16 once more than those of others.
    bound = BOUNDS[q_kind] + (2.5e-4 if "int4" in (kind, v_kind) else 0)
    compare(out, want, bound, False)
    tolerances.assert_lse_close(lse, want_lse, 5e-4 if kind == "int4" else tolerances.LSE)


def in_chunks(rng, shape, kind, q_kind, *ends, uneven=0, apart=None, **options):
    """A prompt in one piece against chunks that end after so many of its queries.

    The same bits; or rows as close as `apart` says, where chunks are not whole: see `docs/reliability.md`. Query rows
    differ by up to ``10 ** uneven``, as powers of two that rows share must not depend on the chunk.
    """
    problem = paged_problems.make(rng, shape, kind, q_kind, block_size=16)
    q, (before,) = problem.problem.q, shape.seq_lens - np.array(shape.new)
    q[:] = (q.astype(np.float64) * 10.0 ** rng.integers(-uneven, 1, (*q.shape[:2], 1))).astype(
        q.dtype
    )

    def attend(begin, end):
        chunk = replace(
            problem.problem, q=q[begin:end], seq_lens=np.array([before + end], I32),
            cu_seqlens_q=np.array([0, end - begin], I32),
        )  # fmt: skip
        return [
            host(x) for x in replace(problem, problem=chunk).run(to, return_lse=True, **options)
        ]

    forget_calls()
    calls = asked()
    whole = attend(0, len(q))
    chunks = [attend(*ends) for ends in zip((0, *ends), (*ends, len(q)), strict=True)]
    out, lse = (np.concatenate(parts) for parts in zip(*chunks, strict=True))
    if apart is None:
        # Each of them went to the kernel for many query rows.
        assert asked() == calls + 1 + len(chunks)
        np.testing.assert_array_equal(operands.words(out), operands.words(whole[0]))
        np.testing.assert_array_equal(lse, whole[1])
    else:
        error = tolerances.row_errors(out, whole[0].astype(np.float64)).max()
        assert error <= apart, f"row error {error} > {apart}"
        tolerances.assert_lse_close(lse, whole[1], max(tolerances.LSE, apart))


def add_chunks(case):
    """Prompts in chunks: multiples of 128 query rows of a kv head behind other tokens, and chunks of fewer rows."""
    # In groups of 8, 128 query rows are 16 tokens; the last chunk has more than these, but no multiple of them.
    shape = Shape(8, 1, 64, (131,), new=(51,))
    case(in_chunks, shape, "bf16", "bf16", 32, everyday=True)
    case(in_chunks, shape, "int8", "bf16", 32, uneven=6, everyday=True)
    case(in_chunks, shape, "fp16", "fp32", 32, window_left=40)
    case(in_chunks, shape, "int4", "bf16", 32, uneven=6, window_left=40)
    # In groups of 3 such chunks are multiples of 128 tokens.
    case(in_chunks, Shape(3, 1, 64, (190,), new=(180,)), "int8", "bf16", 128)
    long = Shape(8, 1, 64, (1531,), new=(51,))  # so that few rows are split
    for kind in ("bf16", "int8"):
        case(in_chunks, long, kind, "fp32", 8, 9, 24, apart=1e-4)


#: One sequence with all queries, as many as there are sequences: other batches of that shape are decode.
ONE_OF_MANY = Shape(64, 1, 64, (40, 0, 9), new=(3, 0, 0))


def add_codes(case):
    """Every kind that is widened, and options of it."""
    case(codes, Shape(2, 1, 64, (83,), new=(70,)), "int8", "bf16", everyday=True)
    case(codes, Shape(4, 2, 128, (200, 90), new=(150, 40)), "int8", "bf16")
    case(codes, Shape(4, 2, 128, (200, 90), new=(150, 40)), "int4", "bf16")
    case(
        codes, Shape(3, 1, 64, (100, 9, 0, 150), new=(60, 3, 0, 130)), "int4", "fp16", block_size=5
    )
    for kind in ("int8", "int4"):
        case(codes, Shape(2, 1, 64, (130,), new=(80,)), kind, "fp16", spread=12)
        case(codes, Shape(2, 1, 64, (130,), new=(80,)), kind, "bf16", uneven=20)
        case(codes, Shape(2, 1, 256, (130,), new=(80,), head_dim_v=64), kind, "bf16")
        options = {"logits_soft_cap": 1.5, "window_left": 20, "sinks": True, "sm_scale": -0.3}
        case(codes, Shape(2, 1, 64, (230,), new=(150,)), kind, "bf16", **options)
    case(through_prefill(lost_codes), Shape(8, 1, 64, (230,), new=(70,)), "int8", "bf16")
    case(codes, Shape(2, 1, 64, (130,), new=(80,)), "int8", "fp32")
    # Of another size than the one before, whose launch would be repeated.
    case(codes, Shape(2, 1, 64, (131,), new=(81,)), "int8", "fp32", uneven=5, spread=3)
    case(codes, Shape(2, 1, 48, (130,), new=(80,), head_dim_v=16), "int8", "bf16", block_size=3)
    case(codes, Shape(1, 1, 192, (140,), new=(140,)), "int4", "bf16")
    for k_kind, v_kind in (("int8", "int4"), ("int8", "bf16"), ("fp16", "int8"), ("int4", "fp16")):
        case(codes, Shape(2, 1, 64, (130,), new=(80,)), k_kind, "bf16", v_kind)


def add_cases(case):
    """Every kind and option of it; `case` takes a function and its arguments."""
    case(prefill, Shape(2, 1, 64, (83,), new=(70,)), "bf16", "bf16", everyday=True)
    case(prefill, Shape(4, 2, 128, (200, 90), new=(150, 40)), "bf16", "bf16")
    case(prefill, Shape(3, 1, 64, (100, 9, 0, 150), new=(60, 3, 0, 130)), "fp16", "fp16")
    for k_kind, q_kind, v_kind in (
        ("bf16", "fp32", "bf16"), ("fp16", "fp32", "fp16"), ("fp16", "bf16", "bf16"), ("bf16", "fp16", "fp16"),
    ):  # fmt: skip
        case(prefill, Shape(2, 1, 128, (130,), new=(80,)), k_kind, q_kind, v_kind)
    case(prefill, Shape(2, 1, 64, (130,), new=(80,)), "fp16", "fp32", factor=1e7, sm_scale=1e-8)
    case(prefill, Shape(2, 1, 40, (130,), new=(80,), head_dim_v=24), "fp16", "fp16", block_size=3)
    case(prefill, Shape(1, 1, 96, (140,), new=(140,)), "bf16", "bf16", block_size=5)
    case(prefill, Shape(2, 1, 256, (130,), new=(80,)), "bf16", "bf16")
    case(prefill, Shape(2, 1, 256, (130,), new=(80,), head_dim_v=64), "fp16", "fp32")
    options = {"logits_soft_cap": 1.5, "window_left": 20, "sinks": True, "sm_scale": -0.3}
    case(prefill, Shape(2, 1, 64, (230,), new=(150,)), "bf16", "bf16", **options)
    case(
        prefill, Shape(2, 1, 64, (230,), new=(150,)), "fp16", "fp16", window_left=100, sm_scale=-0.2
    )
    slots = {"by_slot": True, "ranges": True}
    case(prefill, Shape(2, 1, 64, (230, 90), new=(75, 70)), "bf16", "bf16", **slots)
    case(prefill, Shape(2, 1, 64, (230,), new=(150,)), "bf16", "bf16", lost=True)
    case(prefill, Shape(2, 1, 64, (230,), new=(150,)), "fp16", "fp16", by_slot=True, lost=True)
    odd = (80, 81, 100, 101, 128, 165, 190, 221)
    for kind in ("bf16", "fp16"):
        case(prefill, Shape(2, 1, 64, (230,), new=(150,)), kind, kind, odd=odd)
    add_codes(case)
    add_chunks(case)
    for kind, q_kind in (("bf16", "bf16"), ("int8", "fp32")):
        case(alone, Shape(2, 1, 64, (90, 200, 60), new=(70, 80, 5)), kind, q_kind)
        case(alone, ONE_OF_MANY, kind, q_kind, everyday=kind == "bf16")
