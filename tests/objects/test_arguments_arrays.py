"""Arrays of every kind for every array argument of the functions: taken, or refused by name with nothing changed."""

import numpy as np
import pytest
from array_calls import CALLS
from walked import each

import numkv
from numkv.errors import NotSupported, UnsupportedDType

F32, I32, I64 = np.float32, np.int32, np.int64

#: Each array argument of the calls that there are.
EACH = [(call, name) for call, (_, of) in CALLS.items() for name in of]


def refused(call, name, x, error, match):
    """Call with another argument in the place of one, which has to be named; the others stay what they were."""
    function, arguments = CALLS[call]
    given = {n: a.copy() for n, a in arguments.items()} | {name: x}
    before = {n: a.copy() for n, a in given.items() if isinstance(a, np.ndarray)}
    with pytest.raises(error, match=f"`{name}`: {match}"):
        function(**given)
    for n, a in before.items():
        if not isinstance(a, np.ma.MaskedArray):
            np.testing.assert_array_equal(given[n], a, err_msg=n)


@pytest.mark.parametrize("call", CALLS)
def test_masked_arrays_are_refused(call):
    for name, x in CALLS[call][1].items():
        for mask in (False, np.zeros(x.shape, bool)):
            masked = np.ma.array(x.copy(), mask=mask)
            refused(call, name, masked, NotSupported, "expected .* without a mask")


@pytest.mark.parametrize("call", CALLS)
def test_bytes_in_the_other_order_are_refused(call):
    for name, x in CALLS[call][1].items():
        if x.itemsize > 1 and x.dtype.kind != "V":  # bfloat16 knows one order only
            other = x.astype(x.dtype.newbyteorder())
            refused(call, name, other, UnsupportedDType, "expected")


@pytest.mark.parametrize("call", CALLS)
def test_other_dtypes_are_refused(call):
    errors = UnsupportedDType, NotSupported
    for name, x in CALLS[call][1].items():
        for dtype in (object, bool, np.complex64, np.uint16, "M8[s]", [("x", F32)]):
            refused(call, name, np.zeros(x.shape, dtype), errors, "expected")


@pytest.mark.parametrize("call", CALLS)
def test_arrays_of_rank_0_are_refused(call):
    for name, x in CALLS[call][1].items():
        refused(call, name, np.zeros((), x.dtype), numkv.DimensionMismatch, "expected")


class Raising:
    """Says that it is an array, and fails to hand it over."""

    def __init__(self, of, error):
        self._of, self._error = of, error

    def __getattr__(self, name):
        if name == self._of:
            raise self._error
        raise AttributeError(name)


class Interface:
    """Says of itself as an array what it is told to."""

    def __init__(self, value):
        self.__array_interface__ = value


class Broken:
    """Hands a thing over by DLPack that is none, or fails to."""

    def __init__(self, answer, device=(1, 0)):
        self.answer, self.device = answer, device

    def __dlpack__(self, **options):
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def __dlpack_device__(self):
        return self.device


LIARS = {
    "an interface that raises": lambda: Raising("__array_interface__", RuntimeError("no")),
    "a device that raises": lambda: Raising("__dlpack_device__", KeyError("no")),
    "a marker that raises": lambda: Raising("__cuda_array_interface__", ValueError("no")),
    "an interface of None": lambda: Interface(None),
    "an empty interface": lambda: Interface({}),
    "no such dtype": lambda: Interface({"shape": (1,), "typestr": "nonsense", "data": (0, True), "version": 3}),
    "a negative size": lambda: Interface({"shape": (-1,), "typestr": "<f4", "data": b"1234", "version": 3}),
    "no capsule": lambda: Broken("capsule"),
    "a capsule that raises": lambda: Broken(ZeroDivisionError("no")),
    "no device": lambda: Broken("capsule", None),
    "a word": lambda: "array",
    "bytes": lambda: b"\0" * 64,
    "a set": lambda: {1.0},
}  # fmt: skip


@pytest.mark.parametrize("liar", LIARS)
def test_objects_that_lie_are_refused(liar):
    for call, name in EACH[:6] + EACH[40:48] + EACH[-12:]:
        refused(call, name, LIARS[liar](), (UnsupportedDType, NotSupported), "expected")


def test_objects_that_lie_are_refused_on_cuda():
    from numkv import targets

    to = targets.get("cuda").asarray
    cache = to(np.zeros((1, 2, 4, 8), F32))
    for liar in LIARS.values():
        with pytest.raises((UnsupportedDType, NotSupported), match=r"^`q`: expected"):
            numkv.decode_attention(liar(), cache, cache, to(np.array([2])))
    masked = np.ma.array(np.zeros((1, 2, 8), F32))
    with pytest.raises(NotSupported, match=r"^`q`: expected .* without a mask"):
        numkv.decode_attention(masked, cache, cache, to(np.array([2])))


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@pytest.mark.parametrize("kind", [np.matrix, np.recarray, np.memmap])
def test_other_classes_of_numpy_are_taken_as_plain_arrays(rng, kind, tmp_path):
    q, k = rng.standard_normal((1, 2, 8), F32), rng.standard_normal((1, 2, 4, 8), F32)
    lens = np.array([3])
    want = numkv.decode_attention(q, k, k, lens)
    if kind is np.memmap:
        stored = np.memmap(tmp_path / "k", F32, "w+", shape=k.shape)
        stored[:] = k
        assert np.array_equal(numkv.decode_attention(q, stored, stored, lens), want)
    elif kind is np.recarray:
        assert np.array_equal(numkv.decode_attention(q.view(kind), k, k, lens.view(kind)), want)
    else:
        table = np.matrix([[0]], I32)
        assert np.array_equal(numkv.paged_decode_attention(q, k, k, table, lens), want)


# ---------------------------------------------------------------- lists of integers


def paged(rng):
    pool = rng.standard_normal((4, 2, 3, 8), F32)
    return {
        "q": rng.standard_normal((2, 2, 8), F32), "k_pool": pool, "v_pool": pool[::-1],
        "block_table": np.array([[2, 0], [3, -1]], I32), "seq_lens": np.array([4, 3]),
    }  # fmt: skip


@pytest.mark.parametrize("convert", [list, tuple, np.asarray])
def test_lists_of_integers_will_do(rng, convert):
    given = paged(rng)
    want = numkv.paged_decode_attention(**given)
    listed = {
        "block_table": convert([convert([2, 0]), convert([3, -1])]),
        "seq_lens": convert([4, 3]),
    }
    if convert is np.asarray:
        listed["block_table"] = np.stack(listed["block_table"]).astype(I32)
    assert np.array_equal(numkv.paged_decode_attention(**given | listed), want)
    got = numkv.paged_prefill_attention(**given | listed, cu_seqlens_q=convert([0, 1, 2]))
    assert np.array_equal(got, want)
    rows, pools = given["q"], [np.zeros((4, 2, 3, 8), F32) for _ in range(4)]
    numkv.paged_append(rows, rows, *pools[:2], convert([7, -1]))
    numkv.paged_append(rows, rows, *pools[2:], np.array([7, -1]))
    assert np.array_equal(pools[0], pools[2])
    cache, other = np.zeros((2, 2, 3, 2, 8), F32)
    numkv.append(cache[:, :, :1] + 1, cache[:, :, :1] + 1, cache, other, convert([1, 0]))
    assert cache[0, 0, :, 0].tolist() == [0, 1]
    assert cache[1, 0, :, 0].tolist() == [1, 0]


BAD_LISTS = [
    [[2, 0], [3]], [2.0, 0.0], ["2", "0"], [True, False], [3, None], [3, 2**70], [2j, 0], [[2, 0]], [3, object()],
    [np.float32(2), 0], [1, 2, 0],
]  # fmt: skip


@each("listed", BAD_LISTS)
@each("name", ["block_table", "seq_lens", "slot_mapping", "cache_offsets"])
def test_lists_of_anything_else_are_refused(rng, name, listed):
    given = paged(rng)
    rows, cache = given["q"], np.zeros((2, 2, 3, 8), F32)
    if name == "block_table":
        listed = [listed]  # of one sequence, where there are two
    with pytest.raises((numkv.NumkvError, IndexError), match=f"`{name}`: expected"):
        if name == "slot_mapping":
            numkv.paged_append(rows, rows, cache, cache.copy(), listed)
        elif name == "cache_offsets":
            numkv.append(cache[:, :, :1] + 1, cache[:, :, :1] + 1, cache, cache.copy(), listed)
        else:
            numkv.paged_decode_attention(**given | {name: listed})
    assert not cache.any()


def test_numbers_that_a_table_does_not_hold_are_refused(rng):
    with pytest.raises(
        UnsupportedDType, match="`block_table`: expected int32 numbers, got 2147483648"
    ):
        numkv.paged_decode_attention(**paged(rng) | {"block_table": [[2, 0], [3, 2**31]]})


# ---------------------------------------------------------------- indices of tokens to keep


@pytest.mark.parametrize(
    "keep", [np.ma.array([0, 1]), [0, None], [[0], [1, 2]], ["0"], Raising("__array__", RuntimeError("no")), [2**70],
             [True, False, True], np.array([0, 1], "M8[s]"), 3, None], ids=lambda x: repr(x)[:20]
)  # fmt: skip
def test_tokens_to_keep(keep):
    layer = numkv.ContiguousLayer(4, 1, 4, kind="fp32")
    layer.append(np.ones((3, 1, 4), F32), np.ones((3, 1, 4), F32))
    tally = numkv.AttentionTally(1)
    tally.add(np.ones((1, 3), F32))
    for call in (layer.compact, tally.compact):
        with pytest.raises((numkv.NumkvError, IndexError, ValueError), match="`keep`: expected"):
            call(keep)
    assert len(layer) == len(tally) == 3
