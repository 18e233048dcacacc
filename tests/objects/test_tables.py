"""Converters between block tables, CSR and slots."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from messages import about

import numkv
from numkv.blocks.tables import block_table_to_csr, csr_to_block_table, slot_mapping
from numkv.storage import tables as same_tables

TABLES = [  # block table, lengths, block size; indptr, indices, last page lengths
    ([[7, 2], [5, -1]], [17, 3], 16, [0, 2, 3], [7, 2, 5], [1, 3]),
    ([[4, 9, 1]], [3], 1, [0, 3], [4, 9, 1], [1]),
    ([[4, 9, 1]], [32], 16, [0, 2], [4, 9], [16]),
    ([[-1], [6], [-1]], [0, 2, 0], 2, [0, 0, 1, 1], [6], [0, 2, 0]),
    (np.zeros((0, 3), np.int32), [], 4, [0], [], []),
    (np.zeros((2, 0), np.int32), [0, 0], 4, [0, 0, 0], [], [0, 0]),
]


@pytest.mark.parametrize(("table", "lens", "size", "indptr", "indices", "last"), TABLES)
def test_tables_and_csr(table, lens, size, indptr, indices, last):
    got = block_table_to_csr(np.array(table, np.int32), np.array(lens, np.int32), size)
    assert [x.tolist() for x in got] == [indptr, indices, last]
    assert {x.dtype for x in got} == {np.dtype(np.int32)}
    back, back_lens = csr_to_block_table(*got, size, fill=-7)
    assert back.dtype == back_lens.dtype == np.int32
    assert back_lens.tolist() == list(lens)
    for row, want, n in zip(back, np.array(table), lens, strict=True):
        used = -(-n // size)
        assert row[:used].tolist() == want[:used].tolist()
        assert np.all(row[used:] == -7)


SLOTS = [  # block table, lengths, block size, new; slots
    ([[7, 2], [5, -1]], [17, 3], 16, [2, 1], [127, 32, 82]),
    ([[7, 2], [5, -1]], [17, 3], 16, None, [32, 82]),
    ([[7, 2], [5, -1]], [17, 3], 16, [0, 3], [80, 81, 82]),
    ([[1], [-1]], [2, 0], 2, [2, 0], [2, 3]),
    ([[3, 0, 2]], [3], 1, [3], [3, 0, 2]),
    # the reference system's own: after 11 tokens and after 33
    ([[3, 4, 5, 6]], [16], 16, [5], [59, 60, 61, 62, 63]),
    ([[5, 1, 4, 0, 2, 3]], [40], 16, [7], [65, 66, 67, 68, 69, 70, 71]),
    (np.zeros((0, 2), np.int32), [], 4, [], []),
]


@pytest.mark.parametrize(("table", "lens", "size", "new", "slots"), SLOTS)
def test_slots(table, lens, size, new, slots):
    got = slot_mapping(np.array(table, np.int32), np.array(lens, np.int32), size, new_lens=new)
    assert got.dtype == np.int64
    assert got.tolist() == slots


def test_int64_arrays_and_lists():
    table, lens = [[7, 2], [5, -1]], [17, 3]
    for dtype in (np.int32, np.int64):
        arrays = np.array(table, dtype), np.array(lens, dtype)
        assert slot_mapping(*arrays, 16).tolist() == slot_mapping(table, lens, 16).tolist()
    assert slot_mapping([[2**31 - 1]], [1], 1 << 20).tolist() == [(2**31 - 1) << 20]


@st.composite
def tables(draw):
    """A block size, lengths, a table with garbage past them, and how many tokens are new."""
    size = draw(st.integers(1, 20))
    lens = draw(st.lists(st.integers(0, 60), max_size=5))
    needs = [-(-n // size) for n in lens]
    width = max(needs, default=0) + draw(st.integers(0, 2))
    order = iter(draw(st.permutations(range(sum(needs) + 2))))
    table = np.array(
        [[next(order) if i < n else -9 for i in range(width)] for n in needs], np.int32
    ).reshape(len(lens), width)
    return size, np.array(lens, np.int32), table, [draw(st.integers(0, n)) for n in lens]


@given(tables())
def test_round_trips(drawn):
    size, lens, table, new = drawn
    csr = block_table_to_csr(table, lens, size)
    back, back_lens = csr_to_block_table(*csr, size)
    assert np.array_equal(back_lens, lens)
    used = np.arange(table.shape[1]) < -(-lens[:, None] // size)
    assert np.array_equal(back, np.where(used, table, -1)[:, : back.shape[1]])
    assert not used[:, back.shape[1] :].any()
    for a, b in zip(block_table_to_csr(back, back_lens, size), csr, strict=True):
        assert np.array_equal(a, b)


@given(tables())
def test_slots_are_where_tokens_lie(drawn):
    size, lens, table, new = drawn
    want = [
        int(table[s, p // size]) * size + p % size
        for s, (n, fresh) in enumerate(zip(lens, new, strict=True))
        for p in range(n - fresh, n)
    ]
    got = slot_mapping(table, lens, size, new_lens=np.array(new, np.int64))
    assert got.tolist() == want
    assert len(set(want)) == len(want)


TABLE, LENS = np.array([[7, 2], [5, -1]], np.int32), np.array([17, 3], np.int32)
BAD = [
    (block_table_to_csr, (TABLE, np.array([33, 3], np.int32), 16), "seq_lens", IndexError),
    (block_table_to_csr, (TABLE, np.array([-1, 3], np.int32), 16), "seq_lens", IndexError),
    (block_table_to_csr, (TABLE[0], LENS, 16), "block_table", numkv.DimensionMismatch),
    (block_table_to_csr, (TABLE, LENS[:1], 16), "seq_lens", numkv.DimensionMismatch),
    (block_table_to_csr, (TABLE.astype(float), LENS, 16), "block_table", numkv.UnsupportedDType),
    (block_table_to_csr, (TABLE, LENS, 0), "block_size", numkv.DimensionMismatch),
    (slot_mapping, (TABLE, np.array([40, 3], np.int32), 16), "seq_lens", IndexError),
    (slot_mapping, (TABLE, np.array([17, 0], np.int32), 16), "new_lens", IndexError),
    (csr_to_block_table, ([0, 2, 4], [7, 2, 5], [1, 3], 16), "kv_indptr", numkv.DimensionMismatch),
    (csr_to_block_table, ([1, 2, 3], [7, 2, 5], [1, 3], 16), "kv_indptr", numkv.DimensionMismatch),
    (csr_to_block_table, ([0, 4, 3], [7, 2, 5], [1, 3], 16), "kv_indptr", numkv.DimensionMismatch),
    (csr_to_block_table, ([0, 3], [7, 2, 5], [1, 3], 16), "kv_indptr", numkv.DimensionMismatch),
    (csr_to_block_table, ([0, 2, 3], [7, 2, 5], [17, 3], 16), "kv_last_page_len", IndexError),
    (csr_to_block_table, ([0, 2, 3], [7, 2, 5], [1, 0], 16), "kv_last_page_len", IndexError),
]  # fmt: skip


@pytest.mark.parametrize(("function", "arguments", "name", "error"), BAD)
def test_bad_arguments(function, arguments, name, error):
    with pytest.raises(error, match=about(name)):
        function(*arguments)


@pytest.mark.parametrize("new", [[18, 1], [-1, 1]])
def test_more_new_tokens_than_tokens(new):
    with pytest.raises(IndexError, match=about("new_lens")):
        slot_mapping(TABLE, LENS, 16, new_lens=new)
    with pytest.raises(numkv.DimensionMismatch, match=about("new_lens")):
        slot_mapping(TABLE, LENS, 16, new_lens=[1])


def test_tables_that_are_the_same_in_every_call(target, host):
    """As long as they say they are: kernels would not notice more."""
    for made, numbers in (
        (same_tables.one_block_each(target, 3), [[0], [1], [2]]),
        (same_tables.one_query_each(target, 3), [0, 1, 2, 3]),
        (same_tables.one_sequence(target, 5), [0, 5]),
        (same_tables.one_length(target, 5), [5]),
    ):
        assert host(made).tolist() == numbers
