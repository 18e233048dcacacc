"""Names of prefixes: the byte format, and what makes two prompts share blocks or not."""

import hashlib
import struct
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import numkv
from numkv.blocks.prefix import block_digests, root_digest, token_ids

ZEROS = bytes(32)
KEYS = st.dictionaries(
    st.text(max_size=3),
    st.integers(-(2**70), 2**70) | st.text(max_size=3) | st.binary(max_size=3),
    max_size=3,
)


def key(tag: bytes, kind: bytes, value: bytes) -> bytes:
    return struct.pack("<I", len(tag)) + tag + kind + struct.pack("<I", len(value)) + value


def root(block_size: int, keys: bytes = b"", link: bytes = ZEROS) -> bytes:
    """The root of a chain, from the format's description."""
    return hashlib.sha256(
        link + b"K" + b"numkv" + struct.pack("<II", 1, block_size) + keys
    ).digest()


def chain(link: bytes, tokens: list[int], block_size: int) -> list[bytes]:
    """Digests of the full blocks after a link, from the format's description."""
    digests = []
    for begin in range(0, len(tokens) - block_size + 1, block_size):
        packed = struct.pack(f"<{block_size}i", *tokens[begin : begin + block_size])
        link = hashlib.sha256(link + b"T" + packed).digest()
        digests.append(link)
    return digests


def as_bytes(digests: np.ndarray) -> list[bytes]:
    assert digests.dtype == np.uint8
    assert digests.ndim == 2
    assert digests.shape[1] == 32
    return [row.tobytes() for row in digests]


# -- the format


@pytest.mark.parametrize("num_tokens", [0, 1, 15, 16, 17, 64, 100])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_digests_are_those_of_the_format(rng, num_tokens, block_size):
    tokens = rng.integers(0, 2**31, num_tokens).tolist()
    want = chain(root(block_size), tokens, block_size)
    assert len(want) == num_tokens // block_size
    assert as_bytes(block_digests(tokens, block_size)) == want


# Computed once from the format alone. They are fixed: files and other processes rely on them.
FIXED = [
    ([1, 2, 3, 4], 2, None, [
        "835d00f0de56ca911764971292773cc8ee7d683058523c438a2b4cdb9e3780d8",
        "e3ed3d87edaaeffe7e14644c68f8e854e134b36762dac65933abc4bd217d5bbd",
    ]),
    (list(range(16)), 16, {"adapter": 7}, [
        "5744878c7a701188be8c025f43fd3ca56f678b69c2fcbbb01662448039cf1a12",
    ]),
    ([2**31 - 1], 1, {"salt": b"\x00\xff", "adapter": "größe"}, [
        "f4020f96b7dc4294e8bedec03664e826f0534cea313a7c7c49f0857bddcbf784",
    ]),
]  # fmt: skip


@pytest.mark.parametrize(("tokens", "block_size", "extra", "want"), FIXED)
def test_digests_never_change(tokens, block_size, extra, want):
    assert [d.hex() for d in as_bytes(block_digests(tokens, block_size, extra))] == want


def test_extra_keys_in_the_format():
    keys = (
        key(b"adapter", b"i", b"-12")
        + key(b"image", b"b", b"\x00\x01")
        + key(b"salt", b"s", "größe".encode())
    )
    extra = {"salt": "größe", "adapter": -12, "image": b"\x00\x01"}
    assert root_digest(4, extra) == root(4, keys)
    got = block_digests([5, 6, 7, 8], 4, extra=extra)
    assert as_bytes(got) == chain(root(4, keys), [5, 6, 7, 8], 4)


@pytest.mark.slow
def test_another_process_gives_the_same():
    """Whatever the seed of Python's own hashes is."""
    script = (
        "from numkv.blocks.prefix import block_digests\n"
        "print(block_digests(range(40), 16, {'a': 'x', 'b': 3}).tobytes().hex())"
    )
    for seed in ("0", "1"):
        done = subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True, text=True, check=True, env={"PYTHONHASHSEED": seed},
        )  # fmt: skip
        want = block_digests(range(40), 16, {"b": 3, "a": "x"})
        assert done.stdout.strip() == want.tobytes().hex()


@pytest.mark.parametrize("dtype", [np.uint8, np.int16, np.int32, np.int64, np.uint64, ">i4", ">i8"])
def test_the_dtype_of_token_ids_does_not_matter(dtype):
    tokens = [0, 1, 100, 127, 3, 2]
    want = as_bytes(block_digests(tokens, 2))
    assert as_bytes(block_digests(np.array(tokens, dtype), 2)) == want
    strided = np.zeros(12, dtype)
    strided[::2] = tokens
    assert as_bytes(block_digests(strided[::2], 2)) == want
    assert as_bytes(block_digests(tuple(tokens), 2)) == want


# -- chains


def test_a_partial_last_block_has_no_digest():
    assert block_digests([1, 2, 3], 4).shape == (0, 32)
    assert block_digests([], 4).shape == (0, 32)
    assert len(block_digests([1, 2, 3, 4, 5], 4)) == 1


def test_a_chain_goes_on_from_any_block(rng):
    tokens = rng.integers(0, 1000, 40).tolist()
    whole = block_digests(tokens, 8, {"salt": "x"})
    for n in range(1, 5):
        rest = block_digests(tokens[8 * n :], 8, parent=whole[n - 1])
        assert np.array_equal(rest, whole[n:])
        assert np.array_equal(rest, block_digests(tokens[8 * n :], 8, parent=bytes(whole[n - 1])))
    begin = block_digests(tokens, 8, parent=root_digest(8, {"salt": "x"}))
    assert np.array_equal(begin, whole)


def test_extra_keys_in_the_middle_of_a_chain():
    """An image that begins at the second block: the first block is shared, the second is not."""
    first = block_digests([1, 2], 2)[0].tobytes()
    link = root(2, key(b"image", b"b", b"cat"), first)
    got = block_digests([9, 9], 2, {"image": b"cat"}, parent=first)
    assert as_bytes(got) == chain(link, [9, 9], 2)
    other = block_digests([9, 9], 2, {"image": b"dog"}, parent=first)
    assert as_bytes(other) != as_bytes(got)


@given(
    a=st.lists(st.integers(0, 2), max_size=12),
    b=st.lists(st.integers(0, 2), max_size=12),
    block_size=st.integers(1, 4),
)
def test_blocks_have_one_name_exactly_when_their_prefixes_are_equal(a, b, block_size):
    names_a, names_b = (as_bytes(block_digests(x, block_size)) for x in (a, b))
    for i, name_a in enumerate(names_a):
        for j, name_b in enumerate(names_b):
            same = a[: (i + 1) * block_size] == b[: (j + 1) * block_size]
            assert (name_a == name_b) == same


# -- what keeps prompts apart

APART = [
    {},
    {"adapter": 1},
    {"adapter": "1"},
    {"adapter": b"1"},
    {"adapter": -1},
    {"adapter": 11},
    {"salt": 1},
    {"salt": "1"},
    {"": "1"},
    {"": ""},
    {"a": "b"},
    {"ab": ""},
    {"": "ab"},
    {"a": "", "b": ""},
    {"adapter": 1, "salt": 1},
    {"adapter": "1salt"},
]


def test_extra_keys_never_collide():
    """Neither by kind (an adapter is no salt), nor by type, nor by where one ends and the next begins."""
    names = [root_digest(4, extra) for extra in APART]
    assert len(set(names)) == len(APART)
    blocks = [block_digests([1, 2, 3, 4], 4, extra).tobytes() for extra in APART]
    assert len(set(blocks)) == len(APART)


@given(a=KEYS, b=KEYS)
def test_extra_keys_have_one_name_exactly_when_they_are_equal(a, b):
    assert (root_digest(4, a) == root_digest(4, b)) == (a == b)
    assert root_digest(4, dict(reversed(a.items()))) == root_digest(4, a)


def test_block_sizes_share_nothing():
    """Eight blocks of one token, or one of eight."""
    assert not set(as_bytes(block_digests([1] * 8, 1))) & set(as_bytes(block_digests([1] * 8, 8)))
    assert root_digest(1) != root_digest(2)


def test_tokens_cannot_imitate_extra_keys():
    """Token ids whose bytes are those of a root's message."""
    message = b"numkv" + struct.pack("<II", 1, 4) + key(b"xxx", b"s", b"yyyyyyy")
    assert len(message) % 4 == 0
    tokens = np.frombuffer(message, "<i4")
    parent = block_digests([1], 1)[0].tobytes()
    got = block_digests(tokens, len(tokens), parent=parent)[0].tobytes()
    assert got != root_digest(4, {"xxx": "yyyyyyy"}, parent=parent)


def test_bytes_and_arrays_of_bytes_are_the_same_key():
    assert root_digest(4, {"a": b"xy"}) == root_digest(4, {"a": bytearray(b"xy")})
    assert root_digest(4, {"a": 3}) == root_digest(4, {"a": np.int64(3)})
    assert root_digest(4, {}) == root_digest(4, None) == root_digest(4)


# -- what is refused


@pytest.mark.parametrize(
    ("tokens", "wrong"),
    [
        ([1, -1], -1),
        ([2**31], 2**31),
        (np.array([2**40]), 2**40),
        (np.array([2**63], np.uint64), 2**63),
        (np.array([-5], np.int32), -5),
    ],
)
def test_ids_out_of_range(tokens, wrong):
    with pytest.raises(ValueError, match=rf"`tokens`: expected ids in .*, got {wrong}$"):
        block_digests(tokens, 1)


@pytest.mark.parametrize(
    "tokens", [[1.0], np.ones(3, np.float32), ["a"], [True], [2**70], [None], np.ones(0)]
)
def test_what_is_no_integer(tokens):
    with pytest.raises(numkv.UnsupportedDType, match="`tokens`: expected integers"):
        block_digests(tokens, 1)


@pytest.mark.parametrize("tokens", [5, [[1, 2], [3, 4]], np.zeros((0, 4), np.int32)])
def test_tokens_that_are_no_prompt(tokens):
    with pytest.raises(numkv.DimensionMismatch, match="`tokens`"):
        block_digests(tokens, 2)


@pytest.mark.parametrize("block_size", [0, -1])
def test_a_block_has_tokens(block_size):
    with pytest.raises(numkv.DimensionMismatch, match="`block_size`"):
        block_digests([1], block_size)


@pytest.mark.parametrize("parent", [b"", bytes(31), np.zeros(31, np.uint8), np.zeros(32, np.int8)])
def test_a_parent_that_is_no_digest(parent):
    with pytest.raises(numkv.DimensionMismatch, match="`parent`"):
        block_digests([1], 1, parent=parent)


def test_a_parent_of_another_type():
    with pytest.raises(TypeError, match="`parent`"):
        block_digests([1], 1, parent="0" * 32)


@pytest.mark.parametrize("value", [None, 1.0, True, np.True_, [1], (1,), {"a": 1}])
def test_a_value_of_another_type(value):
    with pytest.raises(TypeError, match="`extra`: expected int, str or bytes under 'a'"):
        block_digests([1], 1, {"a": value})


@pytest.mark.parametrize("tag", [1, b"a", None])
def test_a_tag_of_another_type(tag):
    with pytest.raises(TypeError, match="`extra`: expected strings as tags"):
        block_digests([1], 1, {tag: 1})


def test_token_ids_are_not_copied_where_they_need_not_be():
    ids = np.arange(4, dtype=np.int32)
    assert token_ids(ids) is ids
    assert token_ids([]).dtype == np.int32
