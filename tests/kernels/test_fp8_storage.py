"""8-bit floats through appends, fused writes, key shift, copies and reads, against ml_dtypes; on both targets."""

import ml_dtypes
import naive
import numpy as np
import pytest

import numkv
from numkv import targets
from numkv.storage.buffer import Buffer
from numkv.storage.jit_views import cache_struct, layer_struct
from numkv.storage.pool import Pool

DTYPES = {
    "fp8_e4m3": np.dtype(ml_dtypes.float8_e4m3fn),
    "fp8_e5m2": np.dtype(ml_dtypes.float8_e5m2),
}
LARGEST = {"fp8_e4m3": 448.0, "fp8_e5m2": 57344.0}
HEADS, DIM, SIZE = 2, 10, 4
SCALES = np.float32([0.5, 0.3])
KINDS = pytest.mark.parametrize("name", DTYPES)


def words_of(x, name, scales=(1.0,) * HEADS):
    """The bytes that are stored of rows ``(n, heads, dim)``, as ml_dtypes converts."""
    quotient = x.astype(np.float32) / np.float32(scales)[None, :, None]
    top = np.float32(LARGEST[name])
    with np.errstate(invalid="ignore"):
        return np.clip(quotient, -top, top).astype(DTYPES[name]).view(np.uint8)


def values_of(x, name, scales=(1.0,) * HEADS):
    stored = words_of(x, name, scales).view(DTYPES[name]).astype(np.float32)
    return stored * np.float32(scales)[None, :, None]


def rows(n, seed=0, dtype=np.float32):
    x = np.random.default_rng(seed).standard_normal((n, HEADS, DIM)) * 3
    x[0, 0, :5] = [np.inf, -np.inf, np.nan, 1e6, 1e-9]
    with np.errstate(over="ignore"):
        return x.astype(dtype)


def pool_of(place, name, scales=None, v_name=None, rotate=False):
    kinds = numkv.kind(name), numkv.kind(v_name or name)
    pool = Pool.allocate(place, (3, HEADS, SIZE), DIM, DIM, *kinds, rotate)
    if scales is not None:
        pool.set_scales(k=scales, v=2.0)
    return pool


def stored(pool, which, slots):
    """Stored bytes by slot, ``(n, heads, dim)``."""
    found = pool.target.to_host(pool.buffer(which).words)
    return np.stack([found[slot // SIZE, :, slot % SIZE] for slot in slots])


def bytes_at(place, pool, slots):
    """Stored bytes of a caller's pool by slot, ``(n, heads, dim)``."""
    return place.to_host(pool).view(np.uint8)[slots // SIZE, :, slots % SIZE]


@KINDS
@pytest.mark.parametrize("source", ["fp32", "fp16", "bf16"])
def test_appended_rows_are_those_of_ml_dtypes(target, name, source):
    place = targets.get(target)
    pool = pool_of(place, name, SCALES)
    x = rows(6, dtype=naive.DTYPES[source])
    k = place.asarray(x)
    pool.append(k, k, place.index(np.array([2, 0], np.int32), np.int32), 1)
    slots = [9, 10, 11, 0, 1, 2]
    np.testing.assert_array_equal(stored(pool, "k", slots), words_of(x, name, SCALES))
    np.testing.assert_array_equal(stored(pool, "v", slots), words_of(x, name, (2.0, 2.0)))
    found = place.to_host(pool.rows("k", 0, slice(0, 3))).transpose(1, 0, 2)
    np.testing.assert_array_equal(found, values_of(x, name, SCALES)[3:])


@KINDS
def test_scattered_rows_are_read_back_by_slot(target, name):
    place = targets.get(target)
    pool = pool_of(place, name, SCALES)
    x = rows(4)
    slots = np.array([7, -1, 3, 8])
    pool.scatter(place.asarray(x), place.asarray(x), place.index(slots, np.int64))
    kept = slots >= 0
    gathered = pool.k_buffer.gather(place.index(slots[kept], np.int64))
    np.testing.assert_array_equal(place.to_host(gathered), values_of(x, name, SCALES)[kept])


@KINDS
def test_copies_take_words_as_they_are_and_share_scales(target, name):
    place = targets.get(target)
    pool = pool_of(place, name, SCALES)
    x = rows(8)
    pool.scatter(place.asarray(x), place.asarray(x), place.index(np.arange(8), np.int64))
    other = pool.like(3)
    pool.copy_tokens(np.array([1, 6]), other, np.array([10, 2]))
    np.testing.assert_array_equal(stored(other, "k", [10, 2]), stored(pool, "k", [1, 6]))
    ids = (place.index(np.array([i], np.int32), np.int32) for i in (1, 0))
    pool.copy_blocks(next(ids), other, next(ids))
    np.testing.assert_array_equal(stored(other, "v", range(4)), stored(pool, "v", range(4, 8)))
    found = place.to_host(other.rows("v", 0, slice(0, 4))).transpose(1, 0, 2)
    np.testing.assert_array_equal(found, values_of(x, name, (2.0, 2.0))[4:])


@KINDS
@pytest.mark.nightly
@pytest.mark.parametrize("mode", [numkv.QKMode.COPY, numkv.QKMode.HALF_SPLIT])
def test_fused_writes_are_divided_by_the_scale_of_their_head(target, name, mode):
    place = targets.get(target)
    dtype, q_heads, n = DTYPES[name], 4, 3
    rng = np.random.default_rng(1)
    qkv = rng.standard_normal((n, (q_heads + 2 * HEADS) * DIM)).astype(np.float32) * 3
    angles = rng.uniform(-3, 3, (8, 4)).astype(np.float32)
    k_pool = np.zeros((3, HEADS, SIZE, DIM), np.uint8)
    k_pool, v_pool = (place.asarray(k_pool.copy()).view(dtype) for _ in "kv")
    slots, positions = np.array([4, 11, 0]), np.array([2, 7, 0])
    numkv.paged_write(
        place.asarray(qkv), k_pool, v_pool, place.asarray(slots), num_q_heads=q_heads, qk_mode=mode,
        positions=None if mode is numkv.QKMode.COPY else place.asarray(positions),
        cos=place.asarray(np.cos(angles)), sin=place.asarray(np.sin(angles)),
        k_scale=place.asarray(SCALES), v_scale=0.25,
    )  # fmt: skip
    k, v = qkv[:, q_heads * DIM :].reshape(n, 2, HEADS, DIM).transpose(1, 0, 2, 3)
    found = [bytes_at(place, x, slots) for x in (k_pool, v_pool)]
    np.testing.assert_array_equal(found[1], words_of(v, name, (0.25, 0.25)))
    if mode is numkv.QKMode.COPY:
        np.testing.assert_array_equal(found[0], words_of(k, name, SCALES))
    else:
        c, s = np.cos(angles)[positions][:, None], np.sin(angles)[positions][:, None]
        k = k.astype(np.float64)
        turned = np.concatenate(
            [k[..., :4] * c - k[..., 4:8] * s, k[..., 4:8] * c + k[..., :4] * s, k[..., 8:]], -1
        )
        step = 2.0 ** -(3 if name == "fp8_e4m3" else 2)
        values = np.ascontiguousarray(found[0]).view(dtype).astype(np.float64)
        error = values * SCALES[None, :, None] - turned
        assert np.all(abs(error) <= abs(turned) * step / 2 + 0.01)


@KINDS
def test_keys_are_shifted_in_place_and_what_is_not_rotated_stays(target, name):
    place = targets.get(target)
    pool = pool_of(place, name, SCALES)
    x = rows(4)
    x[0] = x[1]
    pool.scatter(place.asarray(x), place.asarray(x), place.index(np.arange(4), np.int64))
    before = values_of(x, name, SCALES)
    angles = np.random.default_rng(2).uniform(-3, 3, (5, 4)).astype(np.float32)
    shift = numkv.rope_shift(np.cos(angles), np.sin(angles))
    shift.plan(pool, place.index(np.array([1, 3]), np.int64), 2)()
    found = stored(pool, "k", range(4))
    np.testing.assert_array_equal(found[[0, 2]], words_of(x, name, SCALES)[[0, 2]])
    np.testing.assert_array_equal(found[..., 8:], words_of(x, name, SCALES)[..., 8:])
    a, b = before[..., :4], before[..., 4:8]
    c, s = np.cos(angles[2]), np.sin(angles[2])
    turned = np.concatenate([a * c - b * s, b * c + a * s], -1)[[1, 3]]
    step = 2.0 ** -(3 if name == "fp8_e4m3" else 2)
    values = np.ascontiguousarray(found).view(DTYPES[name]).astype(np.float32)
    error = (values * SCALES[None, :, None])[[1, 3], :, :8] - turned
    assert np.all(abs(error) <= abs(turned) * step / 2 + 0.01)


@KINDS
def test_rotated_rows_come_back(target, name):
    place = targets.get(target)
    pool = pool_of(place, name, rotate=True)
    x = np.random.default_rng(3).standard_normal((4, HEADS, DIM)).astype(np.float32)
    pool.scatter(place.asarray(x), place.asarray(x), place.index(np.arange(4), np.int64))
    found = place.to_host(pool.rows("k", 0, slice(0, 4))).transpose(1, 0, 2)
    norm = np.linalg.norm(x, axis=-1, keepdims=True)
    assert np.all(abs(found - x) <= norm * (0.07 if name == "fp8_e4m3" else 0.13))


@KINDS
@pytest.mark.parametrize("scale", [None, 0.5, SCALES])
def test_public_appends_take_a_number_or_one_for_each_head(target, name, scale):
    place = targets.get(target)
    k_pool, v_pool = (
        place.asarray(np.zeros((3, HEADS, SIZE, DIM), np.uint8)).view(DTYPES[name]) for _ in "kv"
    )
    x, slots = rows(2), np.array([5, 0])
    given = place.asarray(scale) if isinstance(scale, np.ndarray) else scale
    numkv.paged_append(
        place.asarray(x), place.asarray(x), k_pool, v_pool, place.asarray(slots), k_scale=given
    )
    by_head = scale if isinstance(scale, np.ndarray) else [1.0 if scale is None else scale] * HEADS
    found = [bytes_at(place, x, slots) for x in (k_pool, v_pool)]
    np.testing.assert_array_equal(found[0], words_of(x, name, by_head))
    np.testing.assert_array_equal(found[1], words_of(x, name))


@pytest.mark.nightly
@pytest.mark.parametrize("name", ["fp8_e4m3", "fp8_e5m2"])
def test_compiled_code_of_a_user_stores_and_loads_by_the_same_scales(name):
    pool = pool_of(targets.get("cpu"), name, SCALES)
    x = rows(3)
    table, lens = np.array([1, 2, 0], np.int32), np.zeros(1, np.int32)
    layer = layer_struct(name, name)(pool.k, pool.v, pool.k_scale, pool.v_scale, table, lens)
    lengths = [np.zeros(3, np.int64), np.zeros(1, np.int64), np.ones(1, np.int64)]
    cache = pool_of(targets.get("cpu"), name, SCALES)
    of_layers = [np.tile(scales, 3) for scales in (cache.k_scale, cache.v_scale)]
    layers = cache_struct(name, name)(cache.k, cache.v, *of_layers, *lengths)
    for row in x:
        assert layer.append(row, row)
        assert layers.append(1, row, row)
    out = np.empty(DIM, np.float32)
    for position in range(3):
        for head in range(HEADS):
            layer.load_k(position, head, out)
            np.testing.assert_array_equal(out, values_of(x, name, SCALES)[position, head])
            layers.load_v(1, position, head, out)
            np.testing.assert_array_equal(out, values_of(x, name, (2.0, 2.0))[position, head])
    np.testing.assert_array_equal(stored(pool, "k", [4, 5, 6]), words_of(x, name, SCALES))


@pytest.mark.parametrize(
    ("scales", "error"),
    [
        (0.0, ValueError), (-1.0, ValueError), (np.inf, ValueError), (np.nan, ValueError),
        (np.float32([1, 0]), ValueError), (np.ones(3, np.float32), numkv.DimensionMismatch),
        (np.ones(2), numkv.UnsupportedDType),
    ],
)  # fmt: skip
def test_bad_scales_are_refused_and_change_nothing(scales, error):
    pool = pool_of(targets.get("cpu"), "fp8_e4m3", SCALES)
    with pytest.raises(error, match="`k`: expected"):
        pool.set_scales(k=scales)
    np.testing.assert_array_equal(pool.k_scale, SCALES)


@pytest.mark.parametrize("name", ["fp16", "int8", "int4"])
def test_other_kinds_have_no_scales_to_set(name):
    buffer = Buffer.allocate(targets.get("cpu"), (1, 2, 4), 8, numkv.kind(name))
    with pytest.raises(numkv.NotSupported, match=f"got {name}"):
        buffer.check_scales("k", 1.0)
