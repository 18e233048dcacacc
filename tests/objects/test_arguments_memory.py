"""What is written shares no memory with what is read: refused by name, nothing changed; neighbours are served."""

import naive
import numpy as np
import pytest
from numpy.lib.stride_tricks import as_strided

import numkv
from numkv.errors import NotSupported

F32, I32, I64 = np.float32, np.int32, np.int64
HEADS, SIZE, DIM = 2, 3, 4


def flat(rng, n):
    return rng.standard_normal(n, F32)


# ---------------------------------------------------------------- out


def attention(rng, to):
    """Arguments of a decode whose arrays are parts of one buffer, by name, and the buffer."""
    room = to(flat(rng, 256))
    return room, {
        "q": room[:24].reshape((2, 3, 4)), "k": room[32:128].reshape((2, 3, 4, 4)),
        "v": room[128:224].reshape((2, 3, 4, 4)), "seq_lens": to(np.array([4, 2], I32)),
    }  # fmt: skip


OVERLAPS = {"q, shifted": 12, "q and k": 20, "k": 40, "k and v": 120, "v": 200}


@pytest.mark.parametrize("where", OVERLAPS)
def test_out_over_what_is_read_is_refused(target, to, host, rng, where):
    room, arguments = attention(rng, to)
    before = host(room).copy()
    first = OVERLAPS[where]
    with pytest.raises(NotSupported, match=r"^`out`: expected .* memory"):
        numkv.decode_attention(**arguments, out=room[first : first + 24].reshape((2, 3, 4)))
    assert np.array_equal(host(room), before)


def test_out_may_be_q_and_may_lie_beside_all(target, to, host, rng):
    room, arguments = attention(rng, to)
    want = host(numkv.decode_attention(**arguments)).copy()
    beside = room[224:248].reshape((2, 3, 4))
    assert np.array_equal(host(numkv.decode_attention(**arguments, out=beside)), want)
    again = room[:24].reshape((2, 3, 4))  # the same memory, another object
    assert np.array_equal(host(numkv.decode_attention(**arguments, out=again)), want)
    assert np.array_equal(host(arguments["q"]), want)


@pytest.mark.parametrize("kind", ["fp32", "int8"])
def test_out_may_be_q_where_rows_are_split(rng, kind):
    """Long rows, whose parts are merged after all of q was read, and several queries to a row of k."""
    layer = numkv.ContiguousLayer(1500, HEADS, 32, kind=kind)
    rows = rng.standard_normal((1500, HEADS, 32), F32)
    layer.append(rows, rows[::-1])
    q = rng.standard_normal((5, 4 * HEADS, 32), F32)
    want = layer.decode_attention(q)
    assert np.array_equal(layer.decode_attention(q, out=q), want)
    assert np.array_equal(q, want)


def test_out_over_a_table_or_scales_is_refused(rng):
    """As words of other dtypes."""
    pool = rng.standard_normal((4, HEADS, SIZE, DIM), F32)
    codes, scales = (
        pool.astype(np.int8),
        np.ones((4, HEADS, SIZE), F32),
    )
    q, out = rng.standard_normal((1, HEADS, DIM), F32), np.zeros((1, HEADS, DIM), F32)
    table = out.reshape(-1)[:4].view(I32)[None]
    for place in (
        {"block_table": table, "seq_lens": [3]},
        {"block_table": [[1]], "seq_lens": out.reshape(-1)[:2].view(I64)},
    ):
        with pytest.raises(NotSupported, match=r"^`out`"):
            numkv.paged_decode_attention(q, pool, pool, **place, out=out)
    within = scales.reshape(-1)[:8].reshape(1, HEADS, DIM)
    with pytest.raises(NotSupported, match=r"^`out`.*`v_scale`"):
        numkv.paged_decode_attention(
            q, codes, codes, [[1]], [3], k_scale=scales.copy(), v_scale=scales, out=within
        )
    with pytest.raises(NotSupported, match=r"^`out`.*`sinks`"):
        numkv.paged_decode_attention(q, pool, pool, [[1]], [3], sinks=out.reshape(-1)[:2], out=out)


WINDOWS = {
    "a step of 0": lambda x, shape: as_strided(x, shape, (0, *x[0].reshape(shape[1:]).strides)),
    "windows": lambda x, shape: as_strided(x, shape, (4, 16, 4)),
    "half a row": lambda x, shape: as_strided(x, shape, (8, 16, 4)),
}


@pytest.mark.parametrize("how", WINDOWS)
def test_elements_of_an_output_have_places_of_their_own(rng, how):
    _, arguments = attention(rng, np.asarray)
    room = np.zeros((4, 3 * 4), F32)
    before = room.copy()
    with pytest.raises(NotSupported, match=r"^`out`: expected .* places of their own"):
        numkv.decode_attention(**arguments, out=WINDOWS[how](room, (2, 3, 4)))
    pool = np.zeros((40,), F32)
    shared = as_strided(pool, (2, HEADS, SIZE, DIM), (0, 48, 16, 4))
    rows = np.ones((1, HEADS, DIM), F32)
    for n in (1, 3000):  # the fast path and the general one
        many = np.repeat(rows, n, 0)
        slots = np.zeros(n, I64)
        with pytest.raises(NotSupported, match=r"^`v_pool`: expected .* places of their own"):
            numkv.paged_append(many, many, np.zeros((2, HEADS, SIZE, DIM), F32), shared, slots)
    assert np.array_equal(room, before)
    assert not pool.any()


def test_falling_steps_of_an_output_are_served(rng):
    _, arguments = attention(rng, np.asarray)
    room = np.zeros((4, 3, 4), F32)
    want = numkv.decode_attention(**arguments)
    assert np.array_equal(numkv.decode_attention(**arguments, out=room[::-2]), want)
    assert np.array_equal(room[3], want[0])
    assert not room[::2].any()


# ---------------------------------------------------------------- pools


LAYOUTS = {  # one buffer, and K and V in it
    "block by block": ((4, 2, HEADS, SIZE, DIM), lambda x: (x[:, 0], x[:, 1])),
    "head by head": ((4, HEADS, 2, SIZE, DIM), lambda x: (x[:, :, 0], x[:, :, 1])),
    "token by token": ((4, HEADS, SIZE, 2, DIM), lambda x: (x[..., 0, :], x[..., 1, :])),
    "row by row": ((4, HEADS, SIZE, 2 * DIM), lambda x: (x[..., :DIM], x[..., DIM:])),
    "one after the other": ((8, HEADS, SIZE, DIM), lambda x: (x[:4], x[4:])),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("tokens", [2, 9])
def test_k_and_v_may_lie_in_one_buffer(target, to, host, rng, layout, tokens):
    shape, cut = LAYOUTS[layout]
    room = to(np.zeros(shape, F32))
    k_pool, v_pool = cut(room)
    k, v = rng.standard_normal((2, tokens, HEADS, DIM), F32)
    slots = rng.permutation(4 * SIZE)[:tokens]
    numkv.paged_append(to(k), to(v), k_pool, v_pool, to(slots))
    for pool, rows in zip(cut(host(room)), (k, v), strict=True):
        want = np.zeros((4, HEADS, SIZE, DIM), F32)
        want[slots // SIZE, :, slots % SIZE] = rows
        assert np.array_equal(pool, want)


BAD_POOLS = {
    "the same": (lambda x: (x[:4], x[:4]), "v_pool"),
    "a block of the other": (lambda x: (x[:4], x[3:7]), "v_pool"),
    "every second, one of them twice": (lambda x: (x[:7:2], x[2:6]), "v_pool"),
}


@pytest.mark.parametrize("how", BAD_POOLS)
@pytest.mark.parametrize("tokens", [1, 2500])
def test_pools_that_share_memory_are_refused(target, to, host, rng, how, tokens):
    if target == "cuda" and tokens > 1:
        tokens = 4
    room = to(flat(rng, 8 * HEADS * SIZE * DIM).reshape(8, HEADS, SIZE, DIM))
    before = host(room).copy()
    cut, name = BAD_POOLS[how]
    pools = cut(room)
    rows, slots = to(np.ones((tokens, HEADS, DIM), F32)), to(np.arange(tokens) % 12)
    with pytest.raises(NotSupported, match=f"^`{name}`: expected memory of its own.*`k_pool`"):
        numkv.paged_append(rows, rows, *pools, slots)
    qkv = to(np.ones((tokens, 3 * HEADS * DIM), F32))
    with pytest.raises(NotSupported, match=f"^`{name}`: expected memory of its own.*`k_pool`"):
        numkv.paged_write(qkv, *pools, slots, num_q_heads=HEADS, qk_mode=0)
    assert np.array_equal(host(room), before)


def test_scales_that_share_memory_are_refused(target, to, host):
    codes = to(np.zeros((2, 4, HEADS, SIZE, DIM), np.int8))
    scales = to(np.ones((2, 4, HEADS, SIZE), F32))
    rows, slots = to(np.ones((2, HEADS, DIM), F32)), to(np.array([0, 5]))
    for k_scale, v_scale in ((scales[0], scales[0]), (scales[1], scales[1])):
        with pytest.raises(
            NotSupported, match=r"^`v_scale`: expected memory of its own.*`k_scale`"
        ):
            numkv.paged_append(
                rows, rows, codes[0], codes[1], slots, k_scale=k_scale, v_scale=v_scale
            )
    assert np.all(host(scales) == 1)
    assert not host(codes).any()


def test_rows_of_the_pool_itself_are_refused(target, to, host, rng):
    """Token-major views of blocks, as a caller might copy tokens."""
    room = to(rng.standard_normal((4, SIZE, HEADS, DIM), F32))
    pool = (
        room.transpose((0, 2, 1, 3))
        if target == "cpu"
        else to(host(room).transpose(0, 2, 1, 3).copy())
    )
    rows = room[1] if target == "cpu" else pool[1].reshape((SIZE, HEADS, DIM))
    other = to(np.zeros((4, HEADS, SIZE, DIM), F32))
    before = host(pool).copy()
    slots = to(np.arange(4, 7))
    with pytest.raises(NotSupported, match=r"^`k_pool`: expected memory of its own.*`k`"):
        numkv.paged_append(rows, rows, pool, other, slots)
    with pytest.raises(NotSupported, match=r"^`v_pool`: expected memory of its own.*`k`"):
        numkv.paged_append(rows, to(np.ones((3, HEADS, DIM), F32)), other, pool, slots)
    assert np.array_equal(host(pool), before)
    assert not host(other).any()


@pytest.mark.parametrize("make", [numkv.ContiguousLayer, numkv.KVCache])
def test_rows_of_the_cache_they_go_to_are_refused(rng, make):
    """Some would be read after they were written: as `copy` says, pass one."""
    single = make is numkv.KVCache
    cache = make(1, HEADS, DIM, max_seq_len=8) if single else make(8, HEADS, DIM, kind="fp32")
    layer = (0,) if single else ()
    rows = rng.standard_normal((3, HEADS, DIM), F32)
    cache.append(*layer, rows, rows)
    stored = cache.k(0) if single else cache.k[0].transpose(1, 0, 2)
    with pytest.raises(NotSupported, match="`k`"):
        cache.append(*layer, stored[1:3], rows[:2])
    cache.append(*layer, stored[1:3].copy(), rows[:2])
    stored = cache.k(0) if single else cache.k[0].transpose(1, 0, 2)
    assert np.array_equal(stored[:5], rows[[0, 1, 2, 1, 2]])


# ---------------------------------------------------------------- append


def caches(rng, to):
    k, v = (to(rng.standard_normal((1, HEADS, 8, DIM), F32)) for _ in range(2))
    new = to(np.ones((1, HEADS, 3, DIM), F32))
    return {
        "k_new": new,
        "v_new": new,
        "k_cache": k,
        "v_cache": v,
        "cache_offsets": to(np.array([2])),
    }


ALIASES = {
    "rows of the cache": lambda a: {"k_new": a["k_cache"][:, :, :3]},
    "rows of the other cache": lambda a: {"k_new": a["v_cache"][:, :, 5:]},
    "one cache": lambda a: {"v_cache": a["k_cache"]},
    "caches a row apart": lambda a: {
        "k_cache": a["k_cache"][:, :, :6], "v_cache": a["k_cache"][:, :, 1:7],
    },
}  # fmt: skip


@pytest.mark.parametrize("how", ALIASES)
def test_append_between_arrays_that_share_memory_is_refused(target, to, host, rng, how):
    made = caches(rng, to)
    before = {name: host(x).copy() for name, x in made.items()}
    given = made | ALIASES[how](made)
    size = given["k_cache"].shape[2]
    descriptor = numkv.AppendDescriptor(1, HEADS, 3, size, DIM, DIM, "fp32")
    plan = numkv.AppendPlan.select(descriptor, target=target)
    for call in (
        lambda: numkv.append(**given),
        lambda: plan.run(numkv.AppendArgs(**given)),
        lambda: plan.can_implement(numkv.AppendArgs(**given)),
    ):
        with pytest.raises(NotSupported, match=r"^`[kv]_cache`: expected memory of its own"):
            call()
    for name, x in made.items():
        assert np.array_equal(host(x), before[name])


# ---------------------------------------------------------------- fused write


def test_q_out_over_what_is_read_is_refused(target, to, host, rng):
    width = 3 * HEADS * DIM
    cos, sin = (to(x) for x in naive.rope_tables(8, DIM))
    (k_pool, v_pool) = (to(np.zeros((4, HEADS, SIZE, DIM), F32)) for _ in range(2))
    room = to(flat(rng, 400))
    qkv = room[: 2 * width].reshape((2, width))
    before = host(room).copy()
    arguments = {
        "num_q_heads": HEADS, "qk_mode": 2, "cos": cos, "sin": sin,
        "positions": to(np.arange(2)),
    }  # fmt: skip
    places = {
        "qkv": room[4 : 4 + 2 * HEADS * DIM].reshape((2, HEADS, DIM)),
        "k_pool": k_pool.reshape((4 * SIZE, HEADS, DIM))[:2],
        "cos": cos.reshape((-1,))[:16].reshape((2, HEADS, DIM)),
    }
    for other, q_out in places.items():
        with pytest.raises(NotSupported, match=f"(`q_out`.*`{other}`)|(`{other}`.*`q_out`)"):
            numkv.paged_write(qkv, k_pool, v_pool, to(np.array([3, 7])), **arguments, q_out=q_out)
    assert np.array_equal(host(room), before)
    assert not host(k_pool).any()


def test_rotation_backward_in_place_and_beside(target, to, host, rng):
    from numkv import targets
    from numkv.storage.hadamard import Rotation

    here, rotation = targets.get(target), Rotation(DIM)
    room = to(flat(rng, 64))
    rows = room[:32].reshape((4, 2, DIM))
    want = host(rotation.backward(here, rows, np.dtype(F32))).copy()
    with pytest.raises(NotSupported, match=r"^`out`"):
        rotation.backward(here, rows, np.dtype(F32), room[8:40].reshape((4, 2, DIM)))
    assert np.array_equal(
        host(rotation.backward(here, rows, np.dtype(F32), room[:32].reshape((4, 2, DIM)))), want
    )
