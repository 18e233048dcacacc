"""The registry of storage kinds: names, sizes, dtypes."""

import ml_dtypes
import naive
import numpy as np
import pytest

import numkv
from numkv.kinds import kinds

TABLE = [  # name, bytes, scales, dtype, word
    ("fp64", 8, False, np.float64, np.float64),
    ("fp32", 4, False, np.float32, np.float32),
    ("fp16", 2, False, np.float16, np.uint16),
    ("bf16", 2, False, ml_dtypes.bfloat16, np.uint16),
    ("int8", 1, True, np.float32, np.int8),
]
ALIASES = {
    "fp64": ["f64", "float64", "FP64"],
    "fp32": ["f32", "float32", "Float32"],
    "fp16": ["f16", "float16"],
    "bf16": ["bfloat16", "BF16"],
    "int8": ["i8", "INT8"],
}


@pytest.mark.parametrize(("name", "size", "has_scales", "dtype", "word"), TABLE)
def test_facts(name, size, has_scales, dtype, word):
    kind = numkv.kind(name)
    assert kind.name == name
    assert kind.bytes_per_element == size
    assert kind.has_scales is has_scales
    assert kind.dtype == np.dtype(dtype)
    assert kind.word == np.dtype(word)
    assert has_scales or kind.dtype == naive.DTYPES[name]


@pytest.mark.parametrize(("name", "alias"), [(n, a) for n, many in ALIASES.items() for a in many])
def test_aliases_give_the_same_object(name, alias):
    assert numkv.kind(alias) is numkv.kind(name)


def test_a_kind_is_its_own_name():
    for kind in kinds():
        assert numkv.kind(kind) is kind
        assert str(kind) == kind.name


def test_registry_is_what_the_table_says():
    assert [kind.name for kind in kinds()] == [row[0] for row in TABLE]


@pytest.mark.parametrize("bad", ["", "fp12", "int3", "float128", "x", None, 16, np.float32])
def test_unknown_names(bad):
    with pytest.raises(numkv.UnsupportedDType, match=r"kind: expected one of .*fp64"):
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
    ],
)
def test_bytes_per_token(name, num_kv_heads, head_dim, head_dim_v, expected):
    actual = numkv.kind(name).bytes_per_token(num_kv_heads, head_dim, head_dim_v)
    assert actual == expected
    assert isinstance(actual, int)


def test_a_kind_cannot_be_changed():
    with pytest.raises(AttributeError):
        numkv.kind("fp16").name = "fp17"
