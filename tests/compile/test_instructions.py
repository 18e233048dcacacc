"""What kernels say in LLVM or PTX (`numkv.kernels.cuda.instructions`): each operation against its line of NumPy.

Kernels of one warp, compiled as any, run by the interpreter of PTX. `words` are 16 for each thread, results as many.
"""

from ptx_on_cuda import device  # leaves this file out where the simulator is on

# isort: split
import warnings

import ml_dtypes
import numpy as np
import pytest
from numba import cuda
from numba.cuda.core.errors import NumbaPerformanceWarning

from numkv.kernels.cuda import instructions as ops
from numkv.kernels.cuda import widen
from numkv.kernels.cuda.attention import prefill_products

U8, U32, F16, F32, F64 = np.uint8, np.uint32, np.float16, np.float32, np.float64
BF16 = ml_dtypes.bfloat16
LANES = np.arange(32)


def run(kernel, *arrays, threads=32):
    """Launch a kernel of one block on arrays, of which the last one is changed."""
    device.forget()
    there = [cuda.to_device(x) for x in arrays]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumbaPerformanceWarning)  # of a small grid
        cuda.jit(kernel)[1, threads](*there)
    found = there[-1].copy_to_host()
    device.check()
    return found


def words_of(rng, count=32 * 16):
    return rng.integers(0, 1 << 32, count, dtype=np.uint64).astype(U32)


def finite_pairs(rng, of, shape):
    """16-bit floats of ordinary sizes, and as words of two."""
    values = rng.standard_normal(shape).astype(of)
    return values, np.ascontiguousarray(values).view(U32)


def fragments(matrix):
    """The words of an 8 x 8 matrix of 16-bit floats: thread (g, t) has row g, elements 2t and 2t + 1."""
    return np.ascontiguousarray(matrix).view(U32).reshape(32)


@pytest.mark.parametrize("of", [BF16, F16], ids=["bf16", "fp16"])
def test_products_of_matrices(of):
    rng = np.random.default_rng(1)
    a, b = (rng.standard_normal(shape).astype(of) for shape in ((16, 16), (16, 8)))
    c = rng.standard_normal((16, 8)).astype(F32)
    mma = ops.mma_bf16 if of is BF16 else ops.mma_fp16

    def kernel(a, b, c, out):
        t = cuda.threadIdx.x
        d = mma(
            a[0, t], a[1, t], a[2, t], a[3, t], b[0, t], b[1, t], c[0, t], c[1, t], c[2, t], c[3, t]
        )
        for i in range(4):
            out[i, t] = d[i]

    parts = [fragments(a[i : i + 8, j : j + 8]) for j in (0, 8) for i in (0, 8)]
    right = [fragments(b[i : i + 8].T) for i in (0, 8)]
    g, t = LANES // 4, LANES % 4
    places = [(g, 2 * t), (g, 2 * t + 1), (g + 8, 2 * t), (g + 8, 2 * t + 1)]
    sums = np.stack([c[p] for p in places])
    got = run(kernel, np.stack(parts), np.stack(right), sums, np.zeros((4, 32), F32))
    d = (a.astype(F64) @ b.astype(F64) + c).astype(F32)
    np.testing.assert_allclose(got, np.stack([d[p] for p in places]), rtol=1e-6, atol=1e-7)


def test_matrices_from_shared_memory():
    """Matrices whose rows lie 48 bytes apart, so that they are no neighbours."""
    rng, steps = np.random.default_rng(2), ops.ldmatrix(4, 0, 16, trans=True)

    def kernel(source, out):
        shared, t = cuda.shared.array(32 * 12, np.uint32), cuda.threadIdx.x
        for i in range(12):
            shared[t * 12 + i] = source[t * 12 + i]
        cuda.syncthreads()
        row = ops.shared_address(shared) + t * 48
        few = ops.shared_address(shared) + (t & 15) * 48
        a, b = ops.ldmatrix_x4(row), ops.ldmatrix_x4_trans(row)
        c, d = ops.ldmatrix_x2(few + 16), ops.ldmatrix_x2_trans(few)
        e = steps(row)
        for i in range(4):
            out[0, i, t], out[1, i, t], out[2, i, t], out[3, i, t] = a[i], b[i], e[i], e[4 + i]
        for i in range(2):
            out[4, i, t], out[4, 2 + i, t] = c[i], d[i]

    source = words_of(rng, 32 * 12)
    rows = source.view(np.uint16).reshape(4, 8, 24)  # [matrix, row, element]
    plain = [np.stack([fragments(m[:, at : at + 8]) for m in rows]) for at in (0, 8)]
    trans = [np.stack([fragments(m[:, at : at + 8].T) for m in rows]) for at in (0, 8)]
    last = np.concatenate([plain[1][:2], trans[0][:2]])
    expected = np.stack([plain[0], trans[0], trans[0], trans[1], last])
    np.testing.assert_array_equal(run(kernel, source, np.zeros((5, 4, 32), U32)), expected)


def test_copies_and_wide_accesses():
    rng = np.random.default_rng(3)

    def kernel(source, out):
        shared, t = cuda.shared.array(32 * 12, np.uint32), cuda.threadIdx.x
        here, there = ops.shared_address(shared) + t * 16, ops.global_address(source) + t * 16
        ops.cp_async_16(here, there)
        ops.cp_async_commit()
        # Every other thread's are zeros; their source is no address, and not read.
        some = (t & 1) * 16
        ops.cp_async_16_or_zeros(here + 512, there if some else t, some)
        ops.cp_async_commit()
        ops.cp_async_wait(1)
        cuda.syncthreads()
        first = ops.load_shared_16(ops.shared_address(shared) + (31 - t) * 16)
        ops.cp_async_wait(0)
        cuda.syncthreads()
        second = ops.load_shared_16(ops.shared_address(shared) + 512 + (31 - t) * 16)
        ops.store_shared_16(here + 1024, first[3], first[2], first[1], first[0])
        pair, one = ops.load_shared_8(here + 1024 + 8), ops.load_shared_4(here + 1024 + 4)
        ops.store_shared_8(here + 1024, pair[1], one)
        ops.store_shared_4(here + 1024 + 8, second[1])
        third = ops.load_shared_16(here + 1024)
        fourth = ops.load_global_16(there)
        at = ops.global_address(out) + t * 64
        ops.store_global_16(at, first[0], first[1], first[2], first[3])
        ops.store_global_16(at + 16, second[0], second[1], second[2], second[3])
        ops.store_global_16(at + 32, third[0], third[1], third[2], third[3])
        ops.store_global_16(at + 48, fourth[0], fourth[1], fourth[2], fourth[3])

    source = words_of(rng, 32 * 4)
    rows = source.reshape(32, 4)
    first = rows[::-1]
    second = np.where(LANES[:, None] % 2 == 0, first, 0)
    third = np.stack([first[:, 0], first[:, 2], second[:, 1], first[:, 0]], 1)
    expected = np.stack([first, second, third, rows], 1)
    got = run(kernel, source, np.zeros((32, 4, 4), U32))
    np.testing.assert_array_equal(got, expected)


def test_floats_of_a_local_array():
    """Pairs that a thread has in a local array, stored some bytes apart; four floats that were pairs of two threads."""
    rng, store = np.random.default_rng(8), ops.store_shared_pairs((0, 512))
    load, later = (ops.load_shared(16, offset, of="f") for offset in (0, 512))

    def kernel(source, out):
        shared, t = cuda.shared.array(256, np.float32, alignment=16), cuda.threadIdx.x
        floats = cuda.local.array(4, np.float32)
        for i in range(4):
            floats[i] = source[t, i]
        store(ops.shared_address(shared) + 8 * t, floats)
        cuda.syncthreads()
        at = ops.shared_address(shared) + 16 * (t & 15)
        a, b = load(at), later(at)
        for i in range(4):
            out[t, i], out[t, 4 + i] = a[i], b[i]

    source = rng.standard_normal((32, 4), F32)
    first, second = (source[:, i : i + 2].reshape(16, 4) for i in (0, 2))
    expected = np.tile(np.concatenate([first, second], 1), (2, 1))
    np.testing.assert_array_equal(run(kernel, source, np.zeros((32, 8), F32)), expected)


def test_rows_by_a_table_and_words():
    """Rows of 16 bytes, whose places a table in shared memory has; single words and pairs of them."""
    rng = np.random.default_rng(7)
    plain, sized = (ops.cp_async_16_rows(2, 8 * 32, 16 * 32, some) for some in (False, True))
    load = ops.ldmatrix(4, 0, 512, into=True)

    def kernel(source, out):
        rows, t = cuda.shared.array(32 * 16, np.uint32), cuda.threadIdx.x
        table, sizes = cuda.shared.array(64, np.int64), cuda.shared.array(64, np.int32)
        for i in range(2):
            table[32 * i + t], sizes[32 * i + t] = 16 * ((7 * t + i) & 31), 16 * (t & 1)
        cuda.syncthreads()
        to, here = ops.shared_address(rows) + 16 * t, ops.global_address(source)
        at, own = ops.shared_address(table) + 8 * t, ops.shared_address(sizes) + 4 * t
        plain(to, at, here)
        sized(to + 1024, at, here, own, 16)
        ops.cp_async_commit()
        ops.cp_async_wait(0)
        cuda.syncthreads()
        for i in range(4):
            for j in range(4):
                out[i, t, j] = rows[128 * i + 4 * t + j]
        words = cuda.local.array(8, np.uint32)
        load(to, words)
        for i in range(8):
            out[4 + i // 4, t, i % 4] = words[i]
        end = ops.global_address(out) + 6 * 512 + 16 * t
        x, y = ops.load_global_8(here + 16 * t + 8)
        ops.store_global_8(end, y, x)
        ops.store_global(end + 8, ops.load_global_4(here + 16 * t))

    source = words_of(rng, 32 * 4).reshape(32, 4)
    first = [source[(7 * LANES + i) & 31] for i in range(2)]
    second = [np.where(LANES[:, None] % 2, x, 0) for x in first]
    matrices = [np.stack([fragments(m) for m in x.reshape(4, 8, 4)], 1) for x in first]
    last = np.stack([source[:, 3], source[:, 2], source[:, 0], 0 * source[:, 0]], 1)
    expected = np.stack([*first, *second, *matrices, last])
    np.testing.assert_array_equal(
        run(kernel, source.reshape(-1), np.zeros((7, 32, 4), U32)), expected
    )


def test_values_of_other_threads():
    rng = np.random.default_rng(4)

    def kernel(source, floats, out):
        t = cuda.threadIdx.x
        out[0, t] = ops.shuffle_xor(source[t], 5)
        out[1, t] = ops.shuffle(source[t], t * 7 & 31)
        out[2, t] = U32(F32(ops.shuffle_xor_float(floats[t], 16)).view(U32))
        out[3, t] = U32(F32(ops.shuffle_float(floats[t], 3)).view(U32))

    x, y = words_of(rng, 32), rng.standard_normal(32).astype(F32)
    floats = y[LANES ^ 16], np.full(32, y[3])
    expected = np.stack([x[LANES ^ 5], x[LANES * 7 & 31], *(f.view(U32) for f in floats)])
    np.testing.assert_array_equal(run(kernel, x, y, np.zeros((4, 32), U32)), expected)


def test_pairs_of_floats():
    rng = np.random.default_rng(5)

    def kernel(a, b, pairs, out):
        t = cuda.threadIdx.x
        out[0, t], out[1, t] = ops.pack_bf16(a[t], b[t]), ops.pack_fp16(a[t], b[t])
        out[2, t] = ops.fma_fp16x2(pairs[1, t], pairs[2, t], pairs[3, t])
        high, low = ops.split_bf16(a[t], b[t])
        out[3, t], out[4, t] = high, low
        high, low = widen.halves_fp16(a[t], b[t])
        out[5, t], out[6, t] = high, low
        x, y = ops.unpack_fp16(pairs[3, t])
        out[7, t], out[8, t] = U32(x.view(U32)), U32(y.view(U32))
        x, y = widen.unpack_bf16(pairs[0, t])
        out[9, t], out[10, t] = U32(x.view(U32)), U32(y.view(U32))
        out[11, t] = U32(F32(ops.exp2_approx(a[t])).view(U32))
        out[12, t] = ops.permute_bytes(pairs[0, t], pairs[1, t], 0x5240)
        out[13, t] = ops.select_bits(pairs[0, t], U32(0x0F0F0F0F), U32(0x80000001))

    a, b = (rng.standard_normal(32).astype(F32) * F32(3) ** rng.integers(-9, 9, 32) for _ in "ab")
    a[:4], b[:4] = [0, -0.0, 1 + 2**-8, 1 + 3 * 2**-8], [np.inf, 65519, 65520, 1e-7]
    a, b = a.astype(F32), b.astype(F32)
    values, words = zip(*(finite_pairs(rng, of, (32, 2)) for of in [BF16] + [F16] * 3), strict=True)
    pairs = np.stack([w[:, 0] for w in words])
    both = np.stack([a, b], 1)
    with np.errstate(all="ignore"):
        packed = [both.astype(of) for of in (BF16, F16)]
        low = [(both - p.astype(F32)).astype(p.dtype) for p in packed]
        x, y, z = (value.astype(F64) for value in values[1:])
        product = (x * y + z).astype(F16)
    got = run(kernel, a, b, pairs, np.zeros((14, 32), U32))
    expected = [*packed, product, packed[0], low[0], packed[1], low[1]]
    for found, want in zip(got[:7], expected, strict=True):
        # Not their bits: NaN has several.
        np.testing.assert_array_equal(
            found.view(want.dtype).reshape(32, 2).astype(F32), want.astype(F32)
        )
    for at, which in ((7, 3), (9, 0)):
        np.testing.assert_array_equal(got[at : at + 2].view(F32).T, values[which].astype(F32))
    with np.errstate(over="ignore"):
        powers = np.exp2(a)
    np.testing.assert_allclose(got[11].view(F32), powers, rtol=2.0**-21, atol=2.0**-126)
    eight = np.concatenate([pairs[0, :, None].view(U8), pairs[1, :, None].view(U8)], 1)
    np.testing.assert_array_equal(got[12].view(U8).reshape(32, 4), eight[:, [0, 4, 2, 5]])
    np.testing.assert_array_equal(got[13], pairs[0] & 0x0F0F0F0F | 0x80000001)


CODES = {"fp8_e4m3": ml_dtypes.float8_e4m3fn, "fp8_e5m2": ml_dtypes.float8_e5m2}


def test_codes_become_floats_exactly():
    """Every INT8 code, and every 8-bit float."""
    int8 = widen.int8_words()
    e4m3, e5m2 = (widen.fp8_words(kind) for kind in CODES)

    def kernel(source, out):
        t = cuda.threadIdx.x
        word = source[t]
        a, b, c = int8(word), e4m3(word), e5m2(word)
        for i in range(2):
            out[t, i], out[t, 2 + i], out[t, 4 + i] = a[i], b[i], c[i]

    codes = np.random.default_rng(6).permutation(256).astype(U8)
    got = run(kernel, codes.view(U32), np.zeros((64, 6), U32), threads=64)
    groups = codes.reshape(64, 4)
    wanted = [groups.view(np.int8), *(groups.view(of8) for of8 in CODES.values())]
    for i, want in enumerate(wanted):
        found = np.ascontiguousarray(got[:, 2 * i : 2 * i + 2]).view(F16).astype(F32)
        np.testing.assert_array_equal(found, want.astype(F32))


def test_chunks_that_prefill_widens():
    """Codes and 8-bit floats as float16, in their order; of INT4, levels times a scale, 2**-9 of that."""
    kinds = ["int8", "fp8_e4m3", "fp8_e5m2", "int4"]
    int8, e4m3, e5m2, int4 = map(prefill_products.make_elements, kinds)

    def kernel(source, out):
        t = cuda.threadIdx.x
        x, y, z, w = source[t, 0], source[t, 1], source[t, 2], source[t, 3]
        factor, offset = U32(0x3E003E00), U32(0xA4A0A4A0)  # 1.5 and -9.25 * 2**-9
        a, b = int8(x, y, z, w, factor, offset), e4m3(x, y, z, w, factor, offset)
        c, d = e5m2(x, y, z, w, factor, offset), int4(x, y, z, w, factor, offset)
        for i in range(4):
            for j in range(2):
                out[t, 4 * j + i] = a[j][i]
                out[t, 8 + 4 * j + i] = b[j][i]
                out[t, 16 + 4 * j + i] = c[j][i]
            for j in range(4):
                out[t, 24 + 4 * j + i] = d[j][i]

    codes = np.concatenate([np.random.default_rng(7).permutation(256) for _ in range(4)]).astype(U8)
    codes = codes.reshape(64, 16)
    got = run(kernel, codes.view(U32), np.zeros((64, 40), U32), threads=64).view(F16).astype(F32)
    wide = codes.view(np.int8), *(codes.view(of) for of in CODES.values())
    for i, (want, factor) in enumerate(zip(wide, (1, 2.0**-8, 1), strict=True)):
        np.testing.assert_array_equal(got[:, 16 * i : 16 * i + 16], want.astype(F32) * F32(factor))
    levels = np.concatenate([codes & 15, codes >> 4], axis=1) - 9.25
    np.testing.assert_array_equal(got[:, 48:], (levels * 1.5 * 2.0**-9).astype(F16).astype(F32))
