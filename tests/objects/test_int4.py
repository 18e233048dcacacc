"""INT4 storage: codes, searched scales and their errors, in every object that stores rows."""

import copy

import naive
import numba
import numpy as np
import paged_problems
import pytest
import tolerances
from kinds import attending
from messages import about
from numba import njit
from problems import Shape
from quantised_stores import Stores, token_major

import numkv
from numkv import targets
from numkv.caches.paged.files import load_sequences, save_sequences

F32, BF16 = np.float32, naive.DTYPES["bf16"]
SOURCES = ["fp32", "fp16", "bf16"]
# Whole groups, groups and a short one, a short one alone; on CUDA rows that are read in chunks and those that are not.
DIMS = {"cpu": [2, 8, 30, 32, 34, 64, 80, 96, 128, 200], "cuda": [2, 32, 34, 80]}
every_dim = pytest.mark.parametrize(
    ("target", "dim"),
    [(target, dim) for target, dims in DIMS.items() for dim in dims],
    indirect=["target"],
)


STORES = Stores("int4")
in_contiguous, in_paged, assert_exact = STORES.in_contiguous, STORES.in_paged, STORES.assert_exact
every_store = pytest.mark.parametrize("store", STORES.all.values(), ids=STORES.all)


def assert_no_worse(values, scale, rows):
    """Elements in range are off by half a scale at most, others by what they lie outside."""
    x = np.asarray(rows).astype(np.float64)
    low = naive.int4_lowest(scale) * scale.astype(np.float64)
    low, scale = (
        np.repeat(a.astype(np.float64), 32, axis=-1)[..., : x.shape[-1]] for a in (low, scale)
    )
    bound = np.maximum(0.5 * scale, np.maximum(low - x, x - (low + 15 * scale)))
    assert np.all(np.abs(values - x) <= bound * (1 + 1e-6) + 2.0**-22 * np.abs(x))


# ---------------------------------------------------------------- codes and scales


@pytest.mark.parametrize("size", [2.0**-100, 0.5, 1.0, 2.0**60])
def test_what_lies_on_levels_is_kept(target, to, host, rng, size):
    """With each of the offsets: the last bits of a scale say where its levels lie."""
    codes = np.stack([rng.permutation([*range(16)] * 2) for _ in range(8)])
    scale = (size * (1 + np.arange(8) / 128)).astype(F32)
    rows = ((codes + np.arange(8)[:, None] / 2 - 9.25) * scale[:, None]).astype(F32)[:, None]
    got, got_scale, *_ = in_contiguous(rows, rows, to, host, target)
    assert np.array_equal(got_scale[:, 0, 0].astype(F32), scale)
    assert np.array_equal(got[:, 0], codes[:, :16] + 16 * codes[:, 16:])
    assert np.array_equal(naive.int4_dequantise(got, got_scale), rows.astype(np.float64))


def test_zeros(target, to, host):
    """A group of zeros has scale 0, whatever its neighbours are, and comes back as +0."""
    rows = np.zeros((2, 1, 66), F32)
    rows[1, 0, 40] = -3
    cache = numkv.KVCache(1, 1, 66, kind="int4", target=target)
    cache.append(0, to(rows), to(-rows))
    assert np.array_equal(host(cache.k_scales(0)).astype(F32) > 0, [[[0, 0, 0]], [[0, 1, 0]]])
    for got in (host(cache.k(0)), host(cache.v(0))):
        assert not got[0].any()
        assert not np.signbit(got[0]).any()


def test_the_order_of_nibbles(target, to, host):
    """Of whole groups j and j + 16 make a byte, of a last group of n elements j and j + n / 2."""
    x = np.zeros(38, F32)
    x[[0, 16, 33, 36]] = -1, 1, -1, 1
    x[[5, 37]] = 1, -1
    codes, *_ = in_contiguous(x[None, None], x[None, None], to, host, target)
    codes = codes[0, 0]
    assert codes.shape == (16 + 3,)
    assert codes[[0, 17]].tolist() == [0xF0, 0xF0]
    assert codes[5] & 15 == 15
    assert codes[18] >> 4 == 0
    middle = {int(c) for c in [*(codes[1:5] & 15), *(codes[1:16] >> 4), codes[16] & 15]}
    assert middle <= {7, 8}


def test_values_come_back_in_order(target, to, host):
    """A ramp of one sign change: what is read is monotonic."""
    x = np.linspace(-1, 1, 74, dtype=F32)[None, None]
    cache = numkv.KVCache(1, 1, 74, kind="int4", target=target)
    cache.append(0, to(x), to(x[..., ::-1].copy()))
    assert np.all(np.diff(host(cache.k(0))[0, 0]) >= -0.05)
    assert np.abs(host(cache.k(0)) - x).max() < 0.1
    assert np.abs(host(cache.v(0)) - x[..., ::-1]).max() < 0.1


SIZES = [1e-30, 1e-20, 1e-7, 6e-8, 1e-3, 1.0, 300.0, 65504.0, 3e38]


@pytest.mark.boundscheck
@every_store
@pytest.mark.parametrize("source", SOURCES)
def test_rows_of_all_sizes(target, to, host, rng, store, source):
    """Exact codes and scales, and errors within what the scales promise; groups of a row differ in size."""
    dim = 78 if target == "cpu" else 34
    sizes = np.array(SIZES[: -1 if source == "fp16" else None])
    k, v = (rng.uniform(-1, 1, (len(sizes), 2, dim)) for _ in "kv")
    for x in (k, v):
        x[..., 0] = np.sign(x[..., 0])
        x[..., 32:] *= 1e-3
    k, v = (naive.round_to(x * sizes[:, None, None], source) for x in (k, v))
    got = store(k, v, to, host, target)
    assert_exact(got, k, v)
    for rows, codes, scale in ((k, *got[:2]), (v, *got[2:])):
        assert_no_worse(naive.int4_dequantise(codes, scale), scale, rows)
        fits = np.abs(rows[..., :32].astype(np.float64)).max(axis=-1) > 1e-29
        assert np.all((scale.astype(F32) > 0)[fits, 0])


@every_dim
def test_every_row_length(target, to, host, rng, dim):
    k, v = (rng.standard_normal((3, 2, dim), F32) for _ in "kv")
    assert_exact(in_contiguous(k, v, to, host, target), k, v)


def test_many_rows(rng):
    """Of several distributions, on the CPU: all offsets are of use."""
    k = rng.standard_normal((3000, 2, 96), F32)
    v = rng.standard_t(2, (3000, 2, 96)).astype(F32)
    v[:1000] += 3
    got = in_contiguous(k, v, lambda x: x, lambda x: x, "cpu")
    assert_exact(got, k, v)
    for rows, codes, scale in ((k, *got[:2]), (v, *got[2:])):
        assert_no_worse(naive.int4_dequantise(codes, scale), scale, rows)
        assert np.all(np.bincount(naive.words(scale).reshape(-1) & 7, minlength=8) > 100)


def test_tiny_rows_far_below_the_promise():
    """Subnormal rows lose digits, not their minds: finite values, errors of the size of the row."""
    rows = np.array([[[1e-45, -1e-45]], [[1e-40, 5e-41]], [[3e-38, 1e-38]]], F32)
    codes, scale, *_ = in_contiguous(rows, rows, lambda x: x, lambda x: x, "cpu")
    assert np.all(np.isfinite(scale.astype(F32)))
    assert np.all(np.abs(naive.int4_dequantise(codes, scale) - rows) <= 2 * np.abs(rows).max())


def test_error_on_gaussian_rows(rng):
    """7.7 % of the rows' size."""
    x = rng.standard_normal((2000, 1, 128), F32)
    codes, scale, *_ = in_contiguous(x, x, lambda x: x, lambda x: x, "cpu")
    error = np.linalg.norm(naive.int4_dequantise(codes, scale) - x) / np.linalg.norm(x)
    assert 0.076 < error < 0.0785


# ---------------------------------------------------------------- what may not be stored


@pytest.mark.parametrize(
    "make",
    [
        lambda **kw: numkv.ContiguousLayer(4, 2, 7, **kw),
        lambda **kw: numkv.PagedLayer(4, 2, 2, 7, **kw),
        lambda **kw: numkv.PagedPool(4, 2, 2, 7, **kw),
        lambda **kw: numkv.KVCache(1, 2, 7, **kw),
        lambda **kw: numkv.KVCache(1, 2, 8, head_dim_v=7, **kw),
        lambda **kw: numkv.PagedKVCache(1, 2, 7, num_blocks=4, **kw),
    ],
)
def test_odd_head_dims(target, make):
    with pytest.raises(numkv.DimensionMismatch, match=r"expected a multiple of 2 for int4.*got 7"):
        make(kind="int4", target=target)
    make(kind="int8", target=target)


@every_store
@pytest.mark.parametrize(("bad", "source"), [(np.nan, "fp32"), (np.inf, "bf16"), (-np.inf, "fp16")])
@pytest.mark.parametrize("which", ["k", "v"])
def test_non_finite_input(target, to, host, store, bad, source, which):
    good = np.ones((3, 2, 34)).astype(naive.DTYPES[source])
    rows = good.copy()
    rows[1, 1, 2] = bad
    rows[2, 0, 0] = bad  # the first one is named
    given = (rows, good) if which == "k" else (good, rows)
    with pytest.raises(numkv.NonFiniteInput, match=about(which)) as caught:
        store(*given, to, host, target)
    if store not in (in_contiguous, in_paged):  # these come in two parts
        assert caught.value.index == (1, 1, 2)
    got = store(*given, to, host, target, check_finite=False)
    scale = got[1 if which == "k" else 3].astype(F32)
    lost = np.zeros(scale.shape, bool)
    lost[[1, 2], [1, 0], 0] = True  # the group that holds it, and no other
    assert np.array_equal(np.isnan(scale), lost)


def test_a_refused_row_changes_nothing(target, to, host, rng):
    layer = numkv.PagedLayer(3, 2, 1, 4, kind="int4", target=target)
    rows = rng.standard_normal((2, 1, 4), F32)
    layer.append(to(rows), to(rows))

    def state():
        buffers = map(host, (layer.k, layer.v, layer.k_scale, layer.v_scale))
        return [naive.words(x).copy() for x in buffers], layer.seq_len, layer.block_indices

    before = state()
    bad = rng.standard_normal((2, 1, 4), F32)
    bad[1, 0, 3] = np.inf
    with pytest.raises(numkv.NonFiniteInput):
        layer.append(to(rows), to(bad))
    with pytest.raises(numkv.NonFiniteInput):
        layer.write(to(np.tile(bad[:, 0], 3)), num_q_heads=1, qk_mode=0)
    with pytest.raises(numkv.UnsupportedDType, match=about("k")):
        layer.append(to(rows.astype(np.float64)), to(rows))
    after = state()
    assert all(np.array_equal(a, b) for a, b in zip(after[0], before[0], strict=True))
    assert after[1:] == before[1:]


CODES, SCALE = np.ones((4, 2, 5, 20), np.uint8), np.ones((4, 2, 5, 2), BF16)


@pytest.mark.parametrize(
    ("scale", "error"),
    [
        (None, numkv.DimensionMismatch),
        (SCALE[..., :1].copy(), numkv.DimensionMismatch),
        (SCALE[..., 0].copy(), numkv.DimensionMismatch),
        (SCALE.astype(F32), numkv.UnsupportedDType),
        (naive.words(SCALE), numkv.UnsupportedDType),
    ],
)
def test_scales_that_do_not_fit(target, to, scale, error):
    rows, slots = to(np.ones((1, 2, 40), F32)), to(np.zeros(1, np.int64))
    pools = [to(CODES.copy()) for _ in "kv"]
    with pytest.raises(error, match=r"`v_scale`: expected bfloat16 \(4, 2, 5, 2\).*got"):
        numkv.paged_append(
            rows, rows, *pools, slots, k_scale=to(SCALE.copy()),
            v_scale=None if scale is None else to(scale),
        )  # fmt: skip


# ---------------------------------------------------------------- objects


def test_what_a_cache_gives_back(target, to, host, rng):
    cache = numkv.KVCache(2, 2, 34, head_dim_v=6, kind="int4", target=target)
    k, v = rng.standard_normal((3, 2, 34), F32), rng.standard_normal((3, 2, 6), F32)
    cache.append(1, to(k), to(v))
    assert (cache.head_dim, cache.head_dim_v, cache.entry_size) == (34, 6, 68)
    for rows, read, codes, scales in (
        (k, cache.k, cache.k_codes, cache.k_scales),
        (v, cache.v, cache.v_codes, cache.v_scales),
    ):
        want, scale = naive.int4_quantise(rows)
        assert host(codes(0)).shape == (0, *want.shape[1:])
        assert np.array_equal(host(codes(1)), want)
        assert np.array_equal(naive.words(host(scales(1))), naive.words(scale))
        assert host(read(1)).dtype == F32
        assert np.array_equal(host(read(1)), naive.int4_dequantise(want, scale).astype(F32))
    assert cache.nbytes == cache.capacity * 2 * numkv.kind("int4").bytes_per_token(2, 34, 6)


def test_growth_copy_and_truncate(target, to, host, rng):
    """Scales move with their codes."""
    cache = numkv.KVCache(2, 1, 4, kind="int4", target=target)
    k, v = (rng.standard_normal((40, 1, 4), F32) for _ in "kv")
    for begin, end in ((0, 5), (5, 16), (16, 33)):
        for layer in (0, 1):
            cache.append(layer, to(k[begin:end]), to(v[begin:end]))
        cache.advance(end - begin)
    twins = [cache.copy(), copy.deepcopy(cache)]
    cache.truncate(3)
    cache.append(0, to(k[33:]), to(v[33:]))
    assert np.array_equal(host(cache.k_codes(0))[3:], naive.int4_quantise(k[33:])[0])
    for twin in twins:
        for layer in (0, 1):
            assert np.array_equal(host(twin.k_codes(layer)), naive.int4_quantise(k[:33])[0])
            scale = host(twin.v_scales(layer))
            assert np.array_equal(naive.words(scale), naive.words(naive.int4_quantise(v[:33])[1]))


@pytest.mark.parametrize("kinds", [("int4", "int4"), ("int8", "int4"), ("int4", "bf16")])
def test_a_fused_write_quantises_what_it_would_have_written(target, to, host, rng, kinds):
    heads, dim = 2, 34
    cos, sin = (to(x) for x in naive.rope_tables(16, dim))
    weights = [to((1 + 0.1 * rng.standard_normal(dim)).astype(F32)) for _ in "qk"]
    qkv = to(rng.standard_normal((3, (4 + 2 * heads) * dim), F32))
    layers = [
        numkv.PagedLayer(4, 3, heads, dim, target=target, **kw)
        for kw in ({"k_kind": kinds[0], "v_kind": kinds[1]}, {"kind": "fp32"})
    ]
    options = {
        "num_q_heads": 4, "cos": cos, "sin": sin, "qk_mode": 1, "q_norm_weight": weights[0],
        "k_norm_weight": weights[1],
    }  # fmt: skip
    q = [host(layer.write(qkv, **options)) for layer in layers]
    assert np.array_equal(*q)
    table = layers[0].block_table[None]
    for which, kind in zip("kv", kinds, strict=True):
        got = naive.gather(host(getattr(layers[0], which)), table, [3])
        plain = naive.gather(host(getattr(layers[1], which)), table, [3])
        if kind == "bf16":
            assert np.array_equal(got, naive.round_to(plain, kind))
            continue
        codes, scale = naive.quantise(plain, kind)
        found = naive.gather(host(getattr(layers[0], f"{which}_scale")), table, [3])
        assert np.array_equal(got, codes)
        assert np.array_equal(naive.words(found), naive.words(scale))


def test_a_paged_cache(target, to, host, rng):
    """Forks, copies of shared blocks, swapping and files move codes and scales together."""
    sizes = {"num_blocks": 12, "block_size": 2, "kind": "int4", "target": target}
    cache = numkv.PagedKVCache(2, 1, 34, **sizes)
    first = cache.add()
    rows = rng.standard_normal((2, 2, 5, 1, 34)).astype(F32)  # layer, K or V, token

    def put(seq, tokens):
        step = cache.reserve([seq], [tokens.stop - tokens.start])
        for layer in range(2):
            step.append(layer, *(to(x) for x in rows[layer][:, tokens]))
        cache.commit(step)

    put(first, slice(0, 3))
    second = cache.fork(first)
    put(first, slice(3, 4))  # its last block was shared
    put(second, slice(4, 5))
    q = rng.standard_normal((2, 2, 34), F32)

    def check(cache, seqs):
        for layer in range(2):
            out = host(cache.decode_attention(layer, list(seqs), to(q)))
            for i, tokens in enumerate(([0, 1, 2, 3], [0, 1, 2, 4])):
                k, v = (
                    naive.int4_dequantise(*naive.int4_quantise(x)).swapaxes(0, 1)[None]
                    for x in rows[layer][:, tokens]
                )
                want, _ = naive.attention(q[i : i + 1], k, v, [4])
                tolerances.assert_rows_close(out[i : i + 1], want, tolerances.INTEGERS)

    check(cache, (first, second))
    other = numkv.PagedKVCache(2, 1, 34, **sizes)
    check(other, [other.swap_in(cache.swap_out(s)) for s in (first, second)])


def test_files_of_mixed_kinds(tmp_path, rng):
    def make(**kw):
        return numkv.PagedKVCache(1, 2, 40, num_blocks=8, block_size=4, **kw)

    cache = make(k_kind="int8", v_kind="int4")
    seq = cache.add()
    step = cache.reserve([seq], [7])
    step.append(0, *rng.standard_normal((2, 7, 2, 40)).astype(F32))
    cache.commit(step)
    q = rng.standard_normal((1, 4, 40), F32)
    want = cache.decode_attention(0, [seq], q)
    path = tmp_path / "sequence.safetensors"
    save_sequences(path, [cache.swap_out(seq)])
    (loaded,) = load_sequences(path)
    other = make(k_kind="int8", v_kind="int4")
    assert np.array_equal(other.decode_attention(0, [other.swap_in(loaded)], q), want)
    with pytest.raises(numkv.NumkvError):
        make(k_kind="int4", v_kind="int8").swap_in(loaded)


@njit
def append_and_read(cache, k, v, k_out, v_out):
    for t in range(k.shape[0]):
        cache.append(k[t], v[t])
        for h in range(k.shape[1]):
            cache.load_k(t, h, k_out[t, h])
            cache.load_v(t, h, v_out[t, h])


def test_own_compiled_code(rng):
    """What it appends is what the layer would have stored, and is read back as float32."""
    k, v = (rng.standard_normal((5, 2, 74), F32) for _ in "kv")
    layer = numkv.PagedLayer(3, 2, 2, 74, kind="int4")
    layer.seq_len = 5  # takes the blocks
    layer.context_lens[0] = 0
    k_out, v_out = np.empty_like(k), np.empty_like(v)
    append_and_read(layer.jit, k, v, k_out, v_out)
    buffers = (layer.k, layer.v, layer.k_scale, layer.v_scale)
    assert_exact(token_major(buffers, layer.block_table[None], 5), k, v)
    for rows, out in ((k, k_out), (v, v_out)):
        assert np.array_equal(out, naive.int4_dequantise(*naive.int4_quantise(rows)).astype(F32))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("dim", "rotary_dim"), [(8, 8), (40, 34), (66, 20)])
def test_shifted_keys(target, to, host, rng, dim, rotary_dim, interleaved):
    """Rotated in float32 and quantised once; rows that stay and groups that do not turn keep their bits."""
    where = targets.get(target)
    tables = naive.rope_tables(20, rotary_dim)
    codes, scale = naive.int4_quantise(rng.standard_normal((3, 2, 2, dim)))
    slots, offset = np.array([4, 1, 0]), -7
    pool, scales = to(codes.copy()), to(scale.copy())
    where.ops.shift_rows(
        pool, "int4", where.words(scales), where.index(slots, np.int64), offset, *map(to, tables),
        interleaved,
    )  # fmt: skip
    got, got_scale = host(pool), host(scales)
    moved = np.zeros((3, 2, 2), bool)
    moved[slots // 2, :, slots % 2] = True
    assert np.array_equal(got[~moved], codes[~moved])
    assert np.array_equal(got_scale[~moved], scale[~moved])
    cos, sin = (table[-offset].astype(np.float64) for table in tables)
    want = naive.rope(naive.int4_dequantise(codes, scale)[moved], cos, -sin, interleaved)
    got, got_scale = got[moved], got_scale[moved]
    assert_no_worse(naive.int4_dequantise(got, got_scale), got_scale, want)
    still = -(-rotary_dim // 32)  # groups from here on
    assert np.array_equal(got[:, 16 * still :], codes[moved][:, 16 * still :])
    assert np.array_equal(got_scale[:, still:], scale[moved][:, still:])
    _, best = naive.int4_quantise(want)
    assert (
        np.mean(naive.words(best) == naive.words(got_scale)) > 0.8
    )  # a hair decides some searches


# ---------------------------------------------------------------- attention


SHAPES = [  # shape, block size
    (Shape(2, 1, 8, (9, 0, 1)), 3),
    (Shape(4, 2, 34, (18,), head_dim_v=6), 16),
    (Shape(3, 1, 32, (5, 6), new=(3, 2)), 1),
    (Shape(2, 1, 64, (70,)), 16),
]
LARGE = [
    (Shape(2, 2, 32, (7, 33)), 1),
    (Shape(16, 4, 64, (129, 2, 17, 0)), 16),
    (Shape(14, 2, 128, (300, 5)), 3),
    (Shape(7, 1, 80, (1, 0, 31, 16)), 7),
    (Shape(9, 1, 96, (70,), head_dim_v=130), 5),
    (Shape(1, 1, 256, (100,)), 256),
    (Shape(8, 1, 128, (130, 20), new=(3, 0)), 1),
    (Shape(4, 2, 320, (40,), new=(40,)), 16),
    (Shape(16, 2, 62, (2100, 37), head_dim_v=2), 16),
]
shapes = pytest.mark.parametrize(
    ("target", "shape", "block_size"),
    [("cpu", *row) for row in LARGE + SHAPES] + [("cuda", *row) for row in SHAPES],
    indirect=["target"],
    ids=str,
)
KINDS = [
    (k_kind, v_kind, q_kind)
    for k_kind, v_kind in [("int4", "int4"), ("int8", "int4"), ("int4", "bf16"), ("fp64", "int4")]
    for q_kind in naive.DTYPES
]


@pytest.mark.boundscheck
@shapes
def test_every_shape(target, to, host, rng, shape, block_size):
    """NaN or garbage in unused slots, blocks, scales and table entries reaches no output."""
    paged_problems.make(rng, shape, "int4", block_size=block_size).check(to, host)


@pytest.mark.parametrize(("k_kind", "v_kind", "q_kind"), attending(KINDS, "kvq"))
def test_kinds_apart(target, to, host, rng, k_kind, v_kind, q_kind):
    shape = Shape(4, 2, 34, (11, 3), new=(2, 1), head_dim_v=40)
    problem = paged_problems.make(rng, shape, k_kind, q_kind, v_kind=v_kind, block_size=4)
    options = {"window_left": 6, "logits_soft_cap": 3.0}
    problem.check(to, host, **options, sinks=rng.standard_normal(4).astype(F32))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 8, 17])
@pytest.mark.parametrize("q_kind", ["fp32", "fp64"])
def test_groups(rng, group, q_kind):
    """Rows that vector code takes at once, on the CPU."""
    shape = Shape(2 * group, 2, 112, (45, 100), new=(2, 45))
    problem = paged_problems.make(rng, shape, "int4", q_kind, block_size=16)
    problem.check(lambda x: x, lambda x: x)


def test_a_later_tokens_rows_do_not_reach_an_earlier_query(target, to, host, rng):
    problem = paged_problems.make(rng, Shape(2, 1, 34, (12,), new=(6,)), "int4", block_size=4)
    want = host(problem.run(to, window_left=5))
    for position in (0, 11):  # left of every window; the last token
        at = problem.block_table[0, position // 4], slice(None), position % 4
        for x in (problem.k_scale, problem.v_scale):
            x[at] = np.nan
    got = host(problem.run(to, window_left=5))
    assert np.array_equal(got[:-1], want[:-1])
    assert np.all(np.isnan(got[-1].astype(F32)))


def test_batch_threads_and_layout_do_not_matter(rng):
    """One sequence alone, in a batch, by one thread, in blocks of any size, contiguous: the same bits."""
    k, v = (rng.standard_normal((2500, 2, 96), F32) for _ in "kv")
    q = rng.standard_normal((1, 8, 96), F32)

    def attend(layer):
        layer.append(k, v)
        return layer.decode_attention(q, return_lse=True)

    kinds = {"k_kind": "int4", "v_kind": "int4"}
    want = attend(numkv.ContiguousLayer(2500, 2, 96, **kinds))
    results = [attend(numkv.PagedLayer(2500, size, 2, 96, **kinds)) for size in (1, 7, 16, 4096)]
    before = numba.get_num_threads()
    try:
        numba.set_num_threads(1)
        results.append(attend(numkv.ContiguousLayer(2600, 2, 96, **kinds)))
    finally:
        numba.set_num_threads(before)
    layer = numkv.ContiguousLayer(2500, 2, 96, **kinds)
    layer.append(k, v)
    batch = [np.repeat(np.asarray(x), 3, axis=0) for x in (q, layer.k, layer.v)]
    scales = {
        f"{w}_scale": np.repeat(getattr(layer, f"{w}_scale").view(np.uint16), 3, 0).view(BF16)
        for w in "kv"
    }
    out, lse = numkv.decode_attention(*batch, [31, 2500, 7], return_lse=True, **scales)
    results.append((out[1:2], lse[1:2]))
    for out, lse in results:
        assert np.array_equal(out, want[0])
        assert np.array_equal(lse, want[1])


def test_rows_of_one_block_and_head_lie_anywhere(target, to, host, rng):
    """Pools and scales may be slices of wider ones."""
    problem = paged_problems.make(rng, Shape(4, 2, 40, (9, 6)), "int4", block_size=4)
    want = host(problem.run(to))
    arrays, _ = problem.arguments(to)
    wide = {}
    for name in ("k_pool", "v_pool", "k_scale", "v_scale"):
        x = getattr(problem, name)
        words = np.zeros((x.shape[0], 2 * x.shape[1], *x.shape[2:3], x.shape[3] + 4), x.dtype)
        words[:, ::2, :, : x.shape[3]] = x
        wide[name] = to(words)[:, ::2, :, : x.shape[3]]
    q, _, _, table, lens = arrays
    got = numkv.paged_decode_attention(
        q, wide["k_pool"], wide["v_pool"], table, lens, k_scale=wide["k_scale"],
        v_scale=wide["v_scale"],
    )  # fmt: skip
    tolerances.assert_rows_close(host(got), want, 1e-6)


@pytest.mark.parametrize("size", [1e-30, 65504.0])
def test_attention_over_rows_of_extreme_size(target, to, host, rng, size):
    layer = numkv.ContiguousLayer(9, 1, 34, kind="int4", target=target)
    k, v = (rng.uniform(-size, size, (9, 1, 34)).astype(F32) for _ in "kv")
    layer.append(to(k), to(v))
    q = rng.standard_normal((1, 1, 34), F32)
    stored = (naive.int4_dequantise(*naive.int4_quantise(x)).swapaxes(0, 1)[None] for x in (k, v))
    want, _ = naive.attention(q, *stored, [9], sm_scale=1 / size)
    out = host(layer.decode_attention(to(q), sm_scale=1 / size))
    tolerances.assert_rows_close(out, want, tolerances.INTEGERS)


@pytest.mark.parametrize(("k_kind", "low", "high"), [("int4", 0.1, 0.1125), ("int8", 0.07, 0.08)])
def test_accuracy_on_gaussian_data(rng, k_kind, low, high):
    """Half of the error comes from K and half from V; q4_0 of llama.cpp is at 12.2 %."""
    tokens, heads, dim, queries = 1000, 4, 128, 48
    k, v = (rng.standard_normal((tokens, heads, dim), F32) for _ in "kv")
    q = rng.standard_normal((queries, 4 * heads, dim), F32)
    layer = numkv.PagedLayer(-(-tokens // 16), 16, heads, dim, k_kind=k_kind, v_kind="int4")
    layer.append(k, v)
    want, _ = naive.attention(q, *(x.swapaxes(0, 1)[None] for x in (k, v)), [tokens], [0, queries])
    error = np.linalg.norm(layer.decode_attention(q) - want) / np.linalg.norm(want)
    assert low < error < high
