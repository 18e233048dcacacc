"""Small calls of every CUDA kernel and kind, each compared with the float64 oracle; for the interpreter of PTX.

A case runs a call of numkv on the target "cuda" and asserts its result. The caller, `tools.cuda.ptx_device`, checks the
kernels' accesses. Shapes are chosen so that loops repeat, tails are ragged and blocks take several items; a few have
more threads than work.
"""

import importlib
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import naive
import numpy as np
import operands
import paged_problems
import problems
import ptx_channel
import ptx_choice
import ptx_latents
import ptx_prefill
import ptx_sight
import tolerances
from kernels import test_compress as codes
from objects.test_paged_compressor import Batch
from problems import Shape
from ptx_writes import (
    F32,
    FLOATS,
    FP8,
    I32,
    I64,
    KINDS,
    NO_RANGES,
    NO_SCALE,
    append,
    append_bad,
    append_small,
    append_views,
    host,
    of_heads,
    ops,
    refused,
    shift,
    to,
    to_words,
    write,
)

import numkv
from numkv import targets


class Case(NamedTuple):
    """A call and its check."""

    name: str
    run: Callable[[np.random.Generator], None]
    everyday: bool = False  #: in every run of CI


# ---------------------------------------------------------------- copies and rows


def copy_tokens(rng, word, within, width=7):
    """Rows between pools, or within one."""
    dtype = np.dtype(f"u{word}")
    source, there = (rng.integers(0, 200, (4, 3, 5, width)).astype(dtype) for _ in range(2))
    a, b = rng.permutation(20)[:9].astype(I64), rng.permutation(20)[:9].astype(I64)
    if within:
        a = np.concatenate([np.arange(6, 15), np.arange(15, 18)]).astype(I64)
        b = a - 6
        there = source.copy()
    here = to(source)
    target = here if within else to(there)
    ops().copy_tokens(here, to(a), target, to(b))
    wanted = np.swapaxes(there, 1, 2).reshape(20, 3, width).copy()
    wanted[b] = np.swapaxes(source, 1, 2).reshape(20, 3, width)[a]
    assert np.array_equal(np.swapaxes(host(target), 1, 2).reshape(20, 3, width), wanted)


def copy_blocks(rng, word, width=1027):
    """Blocks between pools: of as many words as a block of threads takes at once, and some more."""
    dtype = np.dtype(f"u{word}")
    source, there = (rng.integers(0, 200, (4, 1, 1, width)).astype(dtype) for _ in range(2))
    a, b, target = np.array([2, 0, 2, 9], I32), np.array([1, 3, 0, 2], I32), to(there)
    ops().copy_blocks(to(source), to(a), target, to(b))
    there[b[:3]] = source[a[:3]]
    assert np.array_equal(host(target), there)


def copy_rows(rng, dtype, width=37):
    """Rows at an offset for each sequence, of which some lie outside."""
    new, cache = (
        naive.round_to(rng.standard_normal((3, 2, n, width)) * 50, "fp32").astype(dtype)
        for n in (4, 9)
    )
    offsets, there = np.array([-2, 3, 7], I64), to(cache)
    ops().copy_rows(to(new), there, to(offsets))
    assert np.array_equal(host(there), naive.plan_append(new, cache, offsets))


def non_finite(rng, kind, dim=37):
    """The first of several; and none."""
    rows = naive.round_to(rng.standard_normal((11, 3, dim)), kind)
    assert ops().first_non_finite(to_words(rows), kind) == -1
    rows.reshape(-1)[[700, 901, 333]] = np.inf, np.nan, -np.inf
    assert ops().first_non_finite(to_words(rows), kind) == 333


def mend(rng, sides):
    """Rows among floats, of which some are not finite: zeros in their place, on the sides that are looked at."""
    watch = importlib.import_module("numkv.kernels.cuda.late").Watch()
    order = rng.permutation(20).astype(I64)
    slots, aside = order[:9].copy(), order[9]
    slots[4] = -1
    pools, wanted, found = [], [], []
    for side, (dim, token, head, d) in enumerate(((37, 2, 1, 36), (64, 8, 0, 0))):
        rows = rng.standard_normal((20, 3, dim)).astype(F32)
        rows[slots[token], head, d] = rows[order[4], 0, 1] = rows[aside, 2, 5] = -np.inf
        mended = rows.copy()
        if side in sides:
            mended[slots[token], head] = 0
            found.append(("a call", side == 1, (token * 3 + head) * dim + d))
        for x, there in ((rows, pools), (mended, wanted)):
            there.append(np.ascontiguousarray(np.swapaxes(x.reshape(4, 5, 3, dim), 1, 2)))
    here = [to(pool) for pool in pools]
    given = [x if side in sides else None for side, x in enumerate(here)]
    targets.get("cuda").mend_rows(*given, to(slots), watch.look("a call"))
    assert [(report.what, report.of_v, report.index) for report in watch.take()] == found
    for got, want in zip(here, wanted, strict=True):
        assert np.array_equal(host(got), want)


def rotate(rng, source, kind, dim, inverse):
    """Rows times the matrix of signs and a Hadamard transform."""
    signs = rng.choice(np.array([-1, 1], F32), dim)
    x = naive.round_to(rng.standard_normal((7, 3, dim)), source)
    out = to_words(np.zeros(x.shape, naive.DTYPES[kind]))
    ops().rotate_rows(to_words(x), source, to(signs), inverse, out, kind)
    matrix = naive.rotation(signs)
    wanted = x.astype(np.float64) @ (matrix if inverse else matrix.T)
    bound = (1e-15 if "fp64" in (source, kind) else 6e-7) + tolerances.ROUNDING[kind]
    tolerances.assert_rows_close(host(out).view(naive.DTYPES[kind]), wanted, bound)


def merge(rng, kind, dim=70):
    """Two results, of which one or both saw nothing."""
    o = [naive.round_to(rng.standard_normal((5, 3, dim)), kind) for _ in range(2)]
    lse = [rng.standard_normal((5, 3)).astype(F32) for _ in range(2)]
    lse[0][1], lse[1][2], o[0][1] = -np.inf, -np.inf, np.nan
    lse[0][3] = lse[1][3] = -np.inf
    out, total = to_words(np.zeros_like(o[0])), to(np.zeros((5, 3), F32))
    ops().merge_states(to_words(o[0]), to(lse[0]), to_words(o[1]), to(lse[1]), kind, out, total)
    o[0][1] = 0
    wanted, wanted_lse = naive.merge_states(o[0], lse[0], o[1], lse[1])
    bound = max(1e-6, 2 * tolerances.ROUNDING[kind])
    tolerances.assert_rows_close(host(out).view(naive.DTYPES[kind]), wanted, bound)
    tolerances.assert_lse_close(host(total), wanted_lse)


def dequantise(rng, kind):
    """Stored rows of one block as floats."""
    rows = rng.standard_normal((3, 9, 96))
    if kind in FP8:
        words, scale, values = of_heads(rng, rows, kind, 0)
        words, scale = words.view(np.uint8), scale[:, None]
    else:
        words, scale = operands.stored(rows, kind)
        values = naive.dequantise(
            words, scale.view(naive.DTYPES["bf16"]) if kind == "int4" else scale
        )
    got = host(targets.get("cuda").dequantise(numkv.kind(kind), to(words), to(scale)))
    assert np.array_equal(got, values.astype(F32))


# ---------------------------------------------------------------- attention


def attention(rng, shape, k_kind, q_kind, v_kind=None, block_size=16, **options):
    """Over shuffled blocks, with garbage wherever nothing may be read."""
    problem = paged_problems.make(rng, shape, k_kind, q_kind, v_kind=v_kind, block_size=block_size)
    if options.pop("sinks", False):
        options["sinks"] = rng.standard_normal(shape.num_q_heads).astype(F32)
    problem.check(to, host, **options)


def attention_bounds(rng, shape, kind, q_kind, bound, block_size=16, **options):
    """Within a tighter bound than other tests': the error of queries and weights in 16 bits, or in two such halves."""
    problem = paged_problems.make(rng, shape, kind, q_kind, block_size=block_size)
    out = problem.check(to, host, **options)
    tolerances.assert_rows_close(out, problem.expect(**options)[0], bound)


def attention_hidden(rng, shape, kind, q_kind, block_size=16, **options):
    """NaN and infinity in tokens that some queries of a sequence see: others are as if they were not there."""
    problem = paged_problems.make(rng, shape, kind, q_kind, block_size=block_size)
    scaled = problem.k_scale is not None
    k, v = (problem.k_scale, problem.v_scale) if scaled else (problem.k_pool, problem.v_pool)
    for s, n in enumerate(shape.seq_lens):
        last, before = (
            (problem.block_table[s, t // block_size], slice(None), t % block_size)
            for t in (n - 1, n - shape.new[s] - options["window_left"])
        )
        k[last], v[last], v[before] = np.nan, np.inf, np.nan
    with np.errstate(invalid="ignore"):
        want, want_lse = problem.expect(**options)
    out, lse = (host(x) for x in problem.run(to, return_lse=True, **options))
    finite = np.isfinite(want).all(axis=-1)
    assert finite.any()
    assert not finite.all()
    assert np.array_equal(np.isfinite(out.astype(np.float64)), np.isfinite(want))
    bound = tolerances.attention(problem.problem.kind, q_kind)
    tolerances.assert_rows_close(out[finite], want[finite], bound)
    tolerances.assert_lse_close(lse[finite], want_lse[finite], max(bound, tolerances.LSE))


def attention_of_many(rng, count, kind, q_kind, **options):
    """Two split sequences among so many, some of them more than a warp or a block has threads: as each alone."""
    lengths = rng.integers(0, 4, count)
    lengths[count // 2], lengths[-1] = 600, 1100
    shape = Shape(4, 2, 64, tuple(map(int, lengths)), spare=0)
    problem = paged_problems.make(rng, shape, kind, q_kind, block_size=16)
    problem.check(to, host, **options)
    together = [host(x) for x in problem.run(to, return_lse=True, **options)]
    for s in (count // 2, count - 1):
        alone = problem.only(s).run(to, return_lse=True, **options)
        for a, b in zip(alone, together, strict=True):
            assert np.array_equal(host(a).view(np.uint8), b[s : s + 1].view(np.uint8))


def attention_in_a_wider_table(rng, shape, kind, q_kind, columns, block_size=16, **options):
    """Room for so many more splits that another kernel merges them: results are the same to the last bit."""
    problem = paged_problems.make(rng, shape, kind, q_kind, block_size=block_size)
    rest = np.full((len(shape.seq_lens), columns), -1, I32)
    wider = replace(problem, block_table=np.concatenate([problem.block_table, rest], 1))
    found, again = (p.run(to, return_lse=True, **options) for p in (problem, wider))
    for a, b in zip(found, again, strict=True):
        assert np.array_equal(host(a).view(np.uint8), host(b).view(np.uint8))


def attention_of_heads(rng, shape, k_kind, v_kind, q_kind, mass=False, **options):
    """Over 8-bit floats and others, contiguous; and the attention that each token gets."""
    problem = problems.make(rng, shape, "fp32", q_kind)
    stored = []
    for x, kind in ((problem.k, k_kind), (problem.v, v_kind)):
        if kind in FP8:
            stored.append(of_heads(rng, np.nan_to_num(x), kind, 1))
        else:
            words = naive.round_to(np.nan_to_num(x), kind)
            stored.append((words, NO_SCALE, words.astype(np.float64)))
    (k, k_scale, keys), (v, v_scale, values) = stored
    n, heads = problem.q.shape[:2]
    seqs, cu = len(shape.seq_lens), problem.cu_seqlens_q
    starts = np.arange(seqs + 1, dtype=I64) if cu is None else cu.astype(I64)
    batch = [
        to(x)
        for x in (
            np.arange(seqs, dtype=I32)[:, None],
            problem.seq_lens.astype(I64),
            starts,
            NO_RANGES,
        )
    ]
    out, lse = (
        to_words(np.zeros((n, heads, v.shape[3]), problem.q.dtype)),
        to(np.zeros((n, heads), F32)),
    )
    wanted, wanted_lse = naive.attention(problem.q, keys, values, problem.seq_lens, cu, **options)
    scale = 1 / np.sqrt(shape.head_dim)
    limits = options.get("logits_soft_cap", 0.0), options.get("window_left", -1)
    q = to_words(problem.q), q_kind, to_words(k), k_kind, to(k_scale)
    compute = np.float64 if "fp64" in (q_kind, k_kind, v_kind) else F32
    ops().attend(
        *q, to_words(v), v_kind, to(v_scale), *batch, 0, scale, *limits, to(np.zeros(0, compute)), out, lse
    )  # fmt: skip
    bound = max(tolerances.attention(k_kind if k_kind in FLOATS else "fp32", q_kind), 1e-5)
    tolerances.assert_rows_close(host(out).view(problem.q.dtype), wanted, bound)
    tolerances.assert_lse_close(host(lse), wanted_lse)
    if mass:
        weights = to(np.full((seqs, *k.shape[1:3]), np.nan, F32))
        ops().attention_weights(*q, *batch, 0, lse, scale, *limits, weights)
        expected = naive.attention_weights(problem.q, keys, problem.seq_lens, starts, **options)
        tolerances.assert_weights_close(host(weights), expected, k_kind)


def mass(rng, shape, k_kind, q_kind):
    """The attention that each token gets, over contiguous caches; NaN past a length."""
    problem = problems.make(rng, shape, "fp32", q_kind)
    k, scales, values = problem.k, {}, problem.k
    if k_kind in naive.CODES:
        k, scale = naive.quantise(np.nan_to_num(problem.k), k_kind)
        scales, values = {"k_scale": to(scale)}, naive.dequantise(k, scale)
    elif k_kind != "fp32":
        k = values = naive.round_to(problem.k, k_kind)
    starts = np.arange(len(shape.seq_lens) + 1)
    got = host(numkv.attention_weights(to(problem.q), to(k), to(problem.seq_lens), **scales))
    wanted = naive.attention_weights(problem.q, np.nan_to_num(values), problem.seq_lens, starts)
    tolerances.assert_weights_close(got, wanted, k_kind)


def cells(rng, kind):
    """Attention by slots and ranges: a cache of cells in which two sequences share tokens."""
    shape = (2, 64)
    cache = numkv.CausalCache()
    cache.init(kind, 4, 64, 32, target="cuda")
    rows = {}
    batches = [([0, 1, 2, 0, 1], [0, 0, 0, 1, 1]), ([3, 2], [0, 1]), ([4, 3], [0, 1])]
    for positions, sequences in batches:
        cache.start_forward(numkv.Batch(positions=positions, sequences=sequences))
        k, v = (
            naive.round_to(rng.standard_normal((len(positions), *shape)), kind) for _ in range(2)
        )
        for i, (position, sequence) in enumerate(zip(positions, sequences, strict=True)):
            rows[sequence, position] = k[i], v[i]
        cache.put(0, to(k), to(v))
    q = naive.round_to(rng.standard_normal((2, 4, 64)), kind)
    got = host(cache.decode_attention(0, to(q)))
    for i, (position, sequence) in enumerate(zip(*batches[-1], strict=True)):
        k, v = (
            np.stack([rows[sequence, p][j] for p in range(position + 1)], 1)[None] for j in (0, 1)
        )
        wanted, _ = naive.attention(q[i : i + 1], k, v, [position + 1])
        tolerances.assert_rows_close(got[i : i + 1], wanted, tolerances.attention(kind, kind))


# ---------------------------------------------------------------- compressed heads


def compressed(rng, shape, kind):
    """Encoded, decoded, scored and attended to."""
    problem = codes.unit_problem(rng, shape, "cuda", to, host, kind)
    codes.check_encoded(problem)
    out = to(np.full((shape.heads, shape.tokens, shape.dim), np.nan, F32))
    back = to(np.ascontiguousarray(np.swapaxes(problem.rotation, 1, 2)))
    ops().decode_rows(*problem.v[:2], shape.begin, to(problem.v_levels), back, out)
    tolerances.assert_rows_close(host(out), problem.decoded(problem.v), 2e-6)
    scale = 0.3 if shape.projections else 2.0
    for options in ({}, {"window_left": 5, "cap": 0.7})[: 2 if shape.queries > 1 else 1]:
        wanted = problem.expected_scores(scale, **options)
        codes.assert_scores_close(problem.scores(scale, **options), wanted, problem, scale)
        out, lse = problem.attend_lse(scale, **options)
        wanted, wanted_lse = problem.expected(scale, **options)
        tolerances.assert_rows_close(out, wanted, 3e-5)
        assert np.allclose(lse, wanted_lse, rtol=0, atol=2e-5)


def compressed_batch(rng, bits, projections):
    """Ragged sequences, one of them without tokens, in blocks that are not in order."""
    config = numkv.CompressorConfig(32, bits, projections)
    batch = Batch("cuda", to, host, rng, [3, 0, 131], config)
    batch.extend([0, 2], [130, 140])
    for options in ({}, {"window_left": 40, "logits_soft_cap": 2.0}):
        q = batch.queries([1, 1, 3])
        out, lse = batch.attend([0, 1, 2], q, [1, 1, 3], **options)
        assert np.all(out[1] == 0)
        for seq, rows in ((0, slice(0, 1)), (2, slice(2, 5))):
            _, wanted, wanted_lse = batch.expected(
                seq, q[rows], 32**-0.5, options.get("logits_soft_cap", 0.0), options.get("window_left", -1)
            )  # fmt: skip
            tolerances.assert_rows_close(out[rows], wanted, 3e-5)
            assert np.allclose(lse[rows], wanted_lse, rtol=0, atol=2e-5)


# ---------------------------------------------------------------- the table


def cases():
    """All of them, by name."""

    def case(function, *args, everyday=False, **options):
        words = [str(a) for a in args] + [f"{k}={v}" for k, v in options.items()]
        name = f"{function.__name__}[{', '.join(words)}]"
        made.append(Case(name, _call(function, args, options), everyday))

    made: list[Case] = []
    for kind in KINDS:
        case(append, "fp32", kind, False, 96, everyday=kind in ("int8", "int4"))
        case(
            append,
            "fp32" if kind == "fp64" else "bf16",
            kind,
            True,
            34,
            everyday=kind == "fp8_e4m3",
        )
    case(append, "fp32", "code4", False, 96)
    case(append, "bf16", "code4", True, 34)
    case(append, "fp32", "code6", False, 96)
    case(append, "bf16", "code6", True, 40)
    for kind in FLOATS:
        case(append, kind, kind, True, 40)
        case(append, "fp16", kind, False, 40)
        case(non_finite, kind)
        case(non_finite, kind, dim=40)
        case(merge, kind, dim=72)
        case(merge, kind, everyday=kind == "fp16")
        case(append_views, kind, kind, 40, True, everyday=kind == "bf16")
        case(append_views, "fp16", kind, 576 if kind == "bf16" else 24, kind != "fp32")
    for sides in ((0, 1), (1,)):
        case(mend, sides, everyday=len(sides) > 1)
    for kind in naive.EVERYWHERE:
        case(append_views, "bf16", kind, 64, True)
        case(append_views, "bf16", kind, 64, False)
        case(append, "fp32", kind, True, 512)
        case(append, "fp16", kind, True, 544)
        case(append_bad, "fp32", kind, 96, everyday=kind == "int8")
        case(append_bad, "bf16", kind, 34)
        case(append_small, kind)
        case(write, "bf16", kind, kind, 1, True, dim=48)
        case(shift, kind, False, dim=3200, half=8)
        case(write, "fp16", kind, kind, 4, True, dim=128)
        case(write, "fp32", kind, "bf16", 1, False, dim=192)
        for interleaved in (False, True):
            case(
                shift, kind, interleaved, dim=128, half=64, everyday=kind == "int4" and interleaved
            )
            case(shift, kind, interleaved, dim=96, half=20)
    for mode, kind in zip((0, 1, 2, 3, 4, 1, 4, 2), KINDS, strict=True):
        case(write, "bf16" if kind != "fp64" else "fp64", kind, kind, mode, False)
        case(write, "fp32", kind, kind, (mode + 2) % 5, True, everyday=kind == "int8")
        case(shift, kind, mode % 2 == 1, everyday=kind == "int8")
    case(write, "bf16", "code4", "code4", 1, True, dim=48)
    case(write, "fp32", "code4", "bf16", 2, False, dim=64)
    case(shift, "code4", False)
    case(shift, "code4", True, dim=96, half=20)
    case(write, "bf16", "code6", "code6", 1, True, dim=48)
    case(write, "fp32", "code6", "bf16", 2, False, dim=64)
    case(shift, "code6", False)
    case(shift, "code6", True, dim=96, half=20)
    case(write, "fp16", "int8", "int4", 2, True)
    case(write, "fp64", "int8", "fp16", 4, False)
    case(write, "fp32", "fp32", "fp32", 2, True, dim=3200)
    case(refused, everyday=True)
    for word in (1, 2, 4, 8):
        case(copy_tokens, word, False, everyday=word == 2)
        case(copy_tokens, word, True)
        case(copy_blocks, word)
        case(copy_tokens, word, False, width=80)
        case(copy_tokens, word, True, width=16)
        case(copy_blocks, word, width=2080)
    for dtype in (np.int8, np.float16, F32, np.float64):
        case(copy_rows, np.dtype(dtype))
        case(copy_rows, np.dtype(dtype), width=48)
    for source, kind, dim, inverse in (
        ("fp32", "fp32", 128, False), ("fp64", "fp64", 20, True), ("fp16", "fp32", 96, True),
        ("bf16", "bf16", 64, False), ("fp32", "fp16", 7, False), ("fp64", "bf16", 32, True),
    ):  # fmt: skip
        case(rotate, source, kind, dim, inverse, everyday=dim == 96)
    for kind in (*naive.EVERYWHERE, *FP8):
        case(dequantise, kind)
    _attention(case)
    ptx_prefill.add_cases(case)
    ptx_channel.add_cases(case)
    ptx_choice.add_cases(case)
    ptx_latents.add_cases(case)
    for shape, kind in (
        (codes.Shape(64, 1, 0, tokens=150), "fp32"),
        (codes.Shape(24, 3, 9, heads=2, group=3, tokens=40, begin=3), "fp16"),
        (codes.Shape(64, 4, 40, heads=2, group=5, tokens=140), "fp32"),
        # Blocks have several items, and sketches several chunks; early queries see nothing of the last split.
        (codes.Shape(24, 3, 90, heads=5, group=3, tokens=40, begin=3, queries=2), "fp32"),
        (codes.Shape(8, 3, 0, group=3, tokens=260, queries=8), "fp32"),
        (codes.Shape(32, 8, 0, group=2, tokens=20), "bf16"), (codes.Shape(136, 4, 0, tokens=30), "fp32"),
        (codes.Shape(16, 16, 0, tokens=9), "fp64"),
        (codes.Shape(32, 4, 9, group=2, tokens=150, queries=3, v_bits=3), "fp32"),
    ):  # fmt: skip
        case(compressed, shape, kind, everyday=kind == "fp16")
    case(compressed_batch, 4, 9)
    return {c.name: c for c in made}


def _attention(case):
    """Attention: items of 1, 4 and 8 rows of every kind, splits, rows of odd sizes, all options."""
    small = {
        1: Shape(2, 2, 64, (90, 0, 1)),
        4: Shape(8, 2, 64, (70, 129)),
        8: Shape(6, 1, 128, (70, 66), new=(2, 3)),
    }
    for rows, shape in small.items():
        for kind in (*FLOATS, *naive.EVERYWHERE):
            q_kind = {"int8": "fp16", "int4": "bf16"}.get(kind, kind)
            case(attention, shape, kind, q_kind, everyday=rows == 4 and kind in ("bf16", "int8"))
        case(attention, shape, "code4", "fp32", everyday=rows == 4)
        case(attention, shape, "code6", "fp32")
        for kind in FP8:
            case(attention_of_heads, shape, kind, kind, "bf16", mass=True)
    long = Shape(4, 1, 64, (700, 300), spare=0)
    for kind, q_kind in (("fp32", "fp32"), ("bf16", "fp16"), ("int8", "bf16"), ("int4", "fp64")):
        case(attention, long, kind, q_kind, everyday=kind == "fp32")
    # More splits than a team of threads merges; several queries in some splits.
    case(attention, Shape(2, 1, 64, (8600,), spare=0), "fp32", "fp32")
    several = Shape(4, 2, 64, (1300, 900, 70), new=(9, 1, 30), spare=0)
    case(attention, several, "fp32", "fp32")
    case(attention, several, "fp32", "fp32", window_left=700, sinks=True)
    for kind in (*FLOATS, *naive.EVERYWHERE):  # rows that are no multiples of 16 bytes
        case(attention, Shape(4, 1, 34, (70, 3), head_dim_v=6), kind, "fp32", block_size=3)
    case(attention, Shape(4, 1, 34, (70, 3), head_dim_v=6), "code4", "bf16", block_size=3)
    case(attention, Shape(4, 1, 40, (70, 3), head_dim_v=8), "code6", "bf16", block_size=3)
    case(attention, Shape(4, 1, 64, (70, 3), head_dim_v=48), "code6", "fp64", "code4")
    case(attention, Shape(8, 1, 64, (70,), head_dim_v=1100), "bf16", "bf16")
    for k_kind, v_kind, q_kind in (
        ("fp16", "bf16", "fp32"), ("int8", "fp16", "fp16"), ("fp32", "int8", "bf16"), ("int8", "int4", "fp16"),
        ("int4", "fp16", "fp32"), ("fp64", "int4", "fp32"), ("int8", "int8", "fp64"),
    ):  # fmt: skip
        case(attention, Shape(4, 1, 64, (80,)), k_kind, q_kind, v_kind)
    options = {"logits_soft_cap": 1.5, "window_left": 20, "sinks": True, "sm_scale": 0.3}
    case(attention, Shape(4, 2, 64, (90, 70), new=(3, 17)), "bf16", "bf16", **options)
    case(attention, Shape(4, 2, 64, (600,)), "fp32", "fp32", **{**options, "window_left": 500})
    case(attention_of_heads, Shape(3, 1, 7, (150,)), "fp8_e4m3", "fp32", "fp32", window_left=90)
    _decode(case)
    ptx_sight.sight_cases(case)
    _prefill_of_codes(case)
    case(cells, "fp32")
    case(cells, "bf16")
    shape = Shape(4, 2, 64, (140, 3), spare=1)
    for k_kind, q_kind in (
        ("fp64", "fp64"),
        ("fp32", "fp32"),
        ("fp16", "fp32"),
        ("bf16", "bf16"),
        ("int8", "fp32"),
    ):
        case(mass, shape, k_kind, q_kind, everyday=k_kind == "bf16")
    case(mass, Shape(2, 1, 13, (17,)), "int8", "bf16")
    case(mass, Shape(4, 2, 64, (70,)), "int4", "fp32")
    case(mass, Shape(4, 2, 64, (70,)), "code4", "fp32")
    case(mass, Shape(4, 2, 64, (70,)), "code6", "fp32")
    case(mass, Shape(2, 1, 24, (17,)), "code6", "bf16")
    case(mass, Shape(6, 2, 64, (270, 131), new=(1, 1)), "int8", "bf16")


def _decode(case):
    """Few query rows on tensor cores: groups, blocks and rows of other sizes, accuracy, what is hidden."""
    one = {"fp16": "fp16", "bf16": "bf16", "int8": "fp16", "int4": "bf16"}
    for kind, q_kind in one.items():
        case(attention, Shape(16, 1, 64, (70, 3)), kind, q_kind, block_size=1)
        case(attention, Shape(4, 1, 64, (400,), spare=0), kind, q_kind, block_size=7)
        case(
            attention,
            Shape(4, 1, 64, (90, 33), new=(5, 1)),
            kind,
            q_kind,
            window_left=20,
            sinks=True,
        )
        shape = Shape(4, 2, 64, (90, 75), new=(3, 2))
        case(attention_hidden, shape, kind, q_kind, window_left=20, everyday=kind == "bf16")
    for group in (1, 4, 8, 16):
        for kind in ("bf16", "fp16"):
            case(attention_bounds, Shape(group, 1, 64, (130,)), kind, "fp32", 5e-5)
            case(attention_bounds, Shape(group, 1, 64, (130,)), kind, kind, 2e-3)
    for k_kind, v_kind, q_kind in (
        ("fp16", "bf16", "bf16"),
        ("bf16", "int8", "fp32"),
        ("int4", "int8", "bf16"),
    ):
        case(
            attention, Shape(8, 1, 96, (150,), head_dim_v=32), k_kind, q_kind, v_kind, block_size=5
        )
    case(attention, Shape(4, 1, 40, (90,), head_dim_v=24), "bf16", "bf16")
    case(attention, Shape(2, 1, 256, (80,)), "fp16", "fp16")
    options = {"logits_soft_cap": 1.5, "window_left": 20, "sinks": True, "sm_scale": 0.3}
    case(attention, Shape(4, 2, 64, (90, 70), new=(3, 17)), "int8", "fp16", **options)
    for count in (3, 40, 140):
        case(attention_of_many, count, "bf16", "bf16", everyday=count == 3)
    case(attention_of_many, 5, "int8", "fp16")
    case(attention_of_many, 5, "fp32", "fp32")
    # More splits than a block of the merging kernel takes at once, for several heads.
    case(attention, Shape(8, 1, 16, (17500,)), "fp32", "fp32")
    # A block merges several sequences, and the first of them is not split.
    split = Shape(4, 1, 64, (3, 9, 1500, 600, 700, 5), spare=0)
    case(attention_in_a_wider_table, split, "bf16", "bf16", columns=1100)
    case(attention_in_a_wider_table, split, "fp32", "fp32", columns=1100)


def _prefill_of_codes(case):
    """Many query rows over 8-bit floats; what is hidden."""
    many = Shape(3, 1, 64, (150, 9), new=(90, 2))
    of_heads = ptx_prefill.through_prefill(attention_of_heads)
    for k_kind, v_kind, q_kind in (
        ("fp8_e4m3", "fp8_e5m2", "bf16"), ("fp8_e5m2", "fp8_e4m3", "fp32"), ("fp8_e4m3", "fp16", "fp16"),
    ):  # fmt: skip
        case(of_heads, many, k_kind, v_kind, q_kind)
    hidden, shape = (
        ptx_prefill.through_prefill(attention_hidden),
        Shape(4, 2, 64, (120, 75), new=(70, 2)),
    )
    for kind in ("int8", "int4"):
        case(hidden, shape, kind, "bf16", window_left=20)


def _call(function, args, options):
    def run(rng):
        function(rng, *args, **options)

    return run
