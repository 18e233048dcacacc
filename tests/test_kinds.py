"""The registry of storage kinds: names, sizes, dtypes."""

import copy
import pickle

import ml_dtypes
import naive
import numpy as np
import pytest

import numkv
from numkv.kinds import kinds, kinds_of

TABLE = [  # name, bytes, scales, dtype, word
    ("fp64", 8, False, np.float64, np.float64),
    ("fp32", 4, False, np.float32, np.float32),
    ("fp16", 2, False, np.float16, np.uint16),
    ("bf16", 2, False, ml_dtypes.bfloat16, np.uint16),
    ("fp8_e4m3", 1, False, ml_dtypes.float8_e4m3fn, np.uint8),
    ("fp8_e5m2", 1, False, ml_dtypes.float8_e5m2, np.uint8),
    ("int8", 1, True, np.float32, np.int8),
    ("code6", 0.75, True, np.float32, np.uint8),
    ("int4", 0.5, True, np.float32, np.uint8),
    ("code4", 0.5, True, np.float32, np.uint8),
    ("int8_channel", 1, True, np.float32, np.int8),
    ("int4_channel_fine", 0.5, True, np.float32, np.uint8),
    ("int4_channel", 0.5, True, np.float32, np.uint8),
]
ALIASES = {
    "fp64": ["f64", "float64", "FP64"],
    "fp32": ["f32", "float32", "Float32"],
    "fp16": ["f16", "float16"],
    "bf16": ["bfloat16", "BF16"],
    "fp8_e4m3": ["fp8", "f8e4m3", "float8_e4m3fn", "FP8_E4M3"],
    "fp8_e5m2": ["f8e5m2", "float8_e5m2"],
    "int8": ["i8", "INT8"],
    "int4": ["i4", "q4", "INT4"],
}


@pytest.mark.parametrize(("name", "size", "has_scales", "dtype", "word"), TABLE)
def test_facts(name, size, has_scales, dtype, word):
    kind = numkv.kind(name)
    assert kind.name == name
    assert kind.bytes_per_element == size
    assert kind.has_scales is has_scales
    assert kind.dtype == np.dtype(dtype)
    assert kind.word == np.dtype(word)
    assert naive.DTYPES.get(name, kind.dtype) == kind.dtype


@pytest.mark.parametrize(("name", "alias"), [(n, a) for n, many in ALIASES.items() for a in many])
def test_aliases_give_the_same_object(name, alias):
    assert numkv.kind(alias) is numkv.kind(name)


def test_a_kind_is_its_own_name():
    for kind in kinds():
        assert numkv.kind(kind) is kind
        assert str(kind) == kind.name
        assert pickle.loads(pickle.dumps(kind)) is kind
        assert copy.deepcopy(kind) is kind


def test_registry_is_what_the_table_says():
    assert [kind.name for kind in kinds(by_channel=True)] == [row[0] for row in TABLE]
    assert [kind.name for kind in kinds()] == [row[0] for row in TABLE if "channel" not in row[0]]


@pytest.mark.parametrize("bad", ["", "fp12", "int3", "float128", "x", None, 16, np.float32])
def test_unknown_names(bad):
    with pytest.raises(numkv.UnsupportedDType, match=r"^`kind`: expected one of .*fp64"):
        numkv.kind(bad)


@pytest.mark.parametrize(
    ("name", "num_kv_heads", "head_dim", "head_dim_v", "expected"),
    [
        ("fp64", 8, 128, None, 16384),
        ("fp32", 8, 128, None, 8192),
        ("fp16", 8, 128, None, 4096),
        ("bf16", 8, 128, None, 4096),
        ("fp16", 1, 192, 128, 640),
        ("fp32", 3, 7, 5, 144),
        ("fp32", 2, 4, 0, 32),
        ("int8", 8, 128, None, 2112),
        ("int8", 2, 5, 3, 32),
        ("int4", 8, 128, None, 1152),  # 4.5 bits an element
        ("int4", 1, 34, 2, 17 + 4 + 1 + 2),
        ("code6", 8, 128, None, 1600),  # 6.25 bits an element
        ("code6", 1, 40, 8, 30 + 4 + 6 + 4),
        ("code4", 8, 128, None, 1088),  # 4.25 bits an element
        ("code4", 1, 34, 2, 17 + 4 + 1 + 4),
        ("int8_channel", 8, 128, None, 8 * 2 * (128 + 8)),  # 8.5 bits an element
        ("int4_channel_fine", 8, 128, None, 8 * 2 * (64 + 4 + 9)),  # 8.25 bytes, rounded up
        ("int4_channel", 8, 128, None, 8 * 2 * (64 + 8)),
        ("int4_channel", 1, 34, 2, 17 + 3 + 1 + 1),
    ],
)
def test_bytes_per_token(name, num_kv_heads, head_dim, head_dim_v, expected):
    actual = numkv.kind(name).bytes_per_token(num_kv_heads, head_dim, head_dim_v)
    assert actual == expected
    assert isinstance(actual, int)


@pytest.mark.parametrize(
    ("name", "words", "dtype", "shape"),
    [
        ("fp16", 66, np.float32, (0, 0, 0)),
        ("int8", 66, np.float32, (3, 2, 5)),
        ("int4", 33, ml_dtypes.bfloat16, (3, 2, 5, 3)),
        ("code4", 33, np.float32, (3, 2, 5)),
        ("int4_channel", 33, ml_dtypes.bfloat16, None),
    ],
)
def test_rows_of_66_elements(name, words, dtype, shape):
    kind = numkv.kind(name)
    assert kind.words_per_row(66) == words
    assert kind.elements_of(words) == 66
    assert kind.scale_dtype == np.dtype(dtype)
    assert kind.scale_word.itemsize == kind.scale_dtype.itemsize
    if shape is not None:
        assert kind.scale_shape((3, 2, 5), 66) == shape


def test_scales_of_channels_belong_to_whole_groups_of_tokens():
    for name in ("int8_channel", "int4_channel"):
        kind = numkv.kind(name)
        assert (kind.group_tokens, kind.scales_per, kind.scales_per_row(66)) == (64, "channel", 0)
        assert kind.scale_shape((3, 2, 128), 66) == (3, 2, 2, 132)
        with pytest.raises(
            numkv.DimensionMismatch, match=r"`block_size`: expected a multiple of 64 .*choose 128"
        ):
            kind.scale_shape((3, 2, 65), 66)


def test_channels_are_for_keys_of_objects_that_take_them():
    int8, int4, by_8, by_4 = map(numkv.kind, ("int8", "int4", "int8_channel", "int4_channel"))
    assert kinds_of("int4_channel", None, None, by_channel=True) == (by_4, int4)
    assert kinds_of("fp16", "int8_channel", "int4", by_channel=True) == (by_8, int4)
    assert kinds_of("int8_channel", "int8", None) == (int8, int8)
    with pytest.raises(numkv.NotSupported, match=r"`v_kind`: .*int4_channel.*, or take int4"):
        kinds_of("fp16", None, "int4_channel", by_channel=True)
    with pytest.raises(
        numkv.NotSupported,
        match=r"`kind`: .* got int8_channel.* PagedKVCache, or take int8",
    ):
        kinds_of("int8_channel", None, None)


def test_rows_of_six_bits():
    kind = numkv.kind("code6")
    assert kind.unit == (8, 6)
    assert [kind.words_per_row(n) for n in (0, 8, 80, 128)] == [0, 6, 60, 96]
    assert [kind.elements_of(n) for n in (0, 6, 60, 96)] == [0, 8, 80, 128]
    assert (kind.stored_dtype, kind.word) == (np.int16, np.uint8)
    for dim in (4, 7, 34):
        with pytest.raises(numkv.DimensionMismatch, match=r"multiple of 8 for code6.*6 bytes, got"):
            kind.words_per_row(dim)


def test_what_arrays_of_stored_elements_are():
    for kind in kinds():
        layer = numkv.ContiguousLayer(1, 1, 8, kind=kind)
        assert layer.k.dtype == kind.stored_dtype
        assert kind.elements_of(kind.words_per_row(8)) == 8
        assert layer.k.nbytes == kind.words_per_row(8) * kind.word.itemsize


def test_a_byte_has_no_room_for_half_an_int4():
    for dims in ((7, 8), (8, 7)):
        with pytest.raises(numkv.DimensionMismatch, match=r"`head_dim`: expected a multiple of 2"):
            numkv.kind("int4").bytes_per_token(1, *dims)
        with pytest.raises(numkv.DimensionMismatch, match=r"multiple of 2 for code4 storage"):
            numkv.kind("code4").bytes_per_token(1, *dims)


def test_a_kind_cannot_be_changed():
    with pytest.raises(AttributeError):
        numkv.kind("fp16").name = "fp17"
