"""Compaction of `PagedKVCache`: a sequence that dropped tokens is one that never had them, and nobody else notices.

What is left is compared with a fresh cache into which the kept tokens alone were written: bit for bit where keys stay
as they are, and where they are turned with keys that were rotated for their new positions in float64.
"""

import naive
import naive_cells
import numpy as np
import pytest
import tolerances
from layer_lists import paged_kv_cache
from messages import about

import numkv
from numkv.caches.paged.prefix_match import block_names
from numkv.files import load_sequences, save_sequences
from numkv.storage.hadamard import Rotation

F32 = np.float32
HEADS, Q_HEADS, DIM, TOKENS = 2, 4, 8, 11
WINDOWS = [-1, 3, -1, 3]  # two groups; a block serves two layers
SIZE = 2


def make(kind="fp32", *, windows=WINDOWS, num_blocks=40, **options):
    return paged_kv_cache(
        len(windows), HEADS, DIM, num_blocks=num_blocks, block_size=SIZE, kind=kind,
        windows=windows, **options,
    )  # fmt: skip


def text(rng, tokens=TOKENS, layers=4):
    """Rows before rotation ``(layers, tokens, heads, dim)``, with scales that differ by token."""
    x = rng.standard_normal((layers, tokens, HEADS, DIM))
    return (x * rng.uniform(0.1, 9, (tokens, 1, 1))).astype(F32)


def rotated(raw, positions):
    """Keys ``(tokens, heads, dim)`` at some positions, in float64."""
    cos, sin = naive.rope_tables(64, DIM, base=100.0, dtype=np.float64)
    return np.stack(
        [naive.rope(x, cos[p], sin[p], False) for x, p in zip(raw, positions, strict=True)]
    )


def turning(positions=64, dim=DIM):
    return numkv.rope_shift(*naive.rope_tables(positions, dim, base=100.0))


def grow(cache, to, seq, k, v, ids=None):
    """Write ready rows of all layers, ``(layers, tokens, heads, dim)``."""
    step = cache.reserve([seq], [k.shape[1]])
    for layer in range(cache.num_layers):
        step.append(layer, to(np.ascontiguousarray(k[layer])), to(np.ascontiguousarray(v[layer])))
    cache.commit(step, token_ids=ids)


def written(cache, to, k, v, ids=None):
    """A sequence of some rows, of whose prefix nothing was there."""
    seq = cache.add(ids)
    cached = cache.cached_len(seq)
    grow(cache, to, seq, k[:, cached:], v[:, cached:], None if ids is None else ids[cached:])
    return seq


def place_of(cache, seq, layer):
    """A layer's buffers, and the slots of a sequence's tokens there; -1 where there are none."""
    pool, group = cache._store.place(layer)
    state = cache._sequences[seq]
    tokens = np.arange(state.length)
    table = state.tables[group].astype(np.int64)
    slots = np.where(table[tokens // SIZE] < 0, -1, table[tokens // SIZE] * SIZE + tokens % SIZE)
    slots[: state.starts[group]] = -1
    return pool, slots


def bits(cache, host, seq, first=0):
    """All that is stored of a sequence, by layer, from a token on; whether it is there comes first."""
    found = []
    for layer in range(cache.num_layers):
        pool, slots = place_of(cache, seq, layer)
        there = slots[first:] >= 0
        found.append(there)
        for buffer in map(pool.target.to_host, pool.arrays()):
            if buffer.size:
                of_slots = np.moveaxis(buffer, 2, 1).reshape(-1, *np.delete(buffer.shape, [0, 2]))
                found.append(naive.words(of_slots[slots[first:][there]]))
    return found


def keys(cache, host, seq, layer):
    """Which tokens of a layer are there, and their keys as numbers, turned back where they are rotated."""
    pool, slots = place_of(cache, seq, layer)
    there = np.flatnonzero(slots >= 0)
    k, scale = host(pool.values("k")).astype(np.float64), host(pool.k_scale)
    if scale.size:
        k = k * scale.astype(np.float64)[..., None]
    if cache.layers[0].rotate:
        k = k @ naive.rotation(pool.k_rotation.signs)
    return there, k[slots[there] // SIZE, :, slots[there] % SIZE]


def queries(n):
    return np.random.default_rng(n).standard_normal((n, Q_HEADS, DIM)).astype(F32)


def outputs(cache, to, host, seqs):
    q = to(queries(1).repeat(len(seqs), 0))
    return [host(cache.decode_attention(n, seqs, q)) for n in range(cache.num_layers)]


def state_of(cache):
    """Everything that a refused call leaves as it was."""
    states = [
        (seq, s.length, [t.tolist() for t in s.tables], s.tokens.tolist(), s.registered, s.cached,
         [d.tobytes() for d in s.digests], s.starts[:])
        for seq, s in cache._sequences.items()
    ]  # fmt: skip
    buffers = [
        x.tobytes() for pool in cache._pools for x in map(pool.target.to_host, pool.arrays())
    ]
    books = [x.tobytes() for x in (cache.blocks._state, cache.blocks._digests)]
    return states, buffers, books, cache.stats()


def refused(cache, error, match, call, *args, **options):
    before = state_of(cache)
    with pytest.raises(error, match=match):
        call(*args, **options)
    assert state_of(cache) == before
    cache.check()


def assert_same(a, b):
    assert len(a) == len(b)
    for x, y in zip(a, b, strict=True):
        assert np.array_equal(x, y)


KEEPS = {
    "holes": [0, 1, 3, 6, 7, 8, 9, 10],
    "first-and-recent": [0, 1, 2, 7, 8, 9, 10],
    "end": [7, 8, 9, 10],
    "all": list(range(TOKENS)),
    "nothing": [],
}


# ---------------------------------------------------------------- against recomputation


@pytest.mark.parametrize(
    ("kind", "keep", "rotate"),
    [
        *(("fp16", keep, False) for keep in KEEPS.values()),
        ("int8", KEEPS["holes"], False),
        ("int4", KEEPS["end"], False),
        ("int4", KEEPS["holes"], True),
    ],
)
def test_as_if_the_others_had_never_been_written(target, to, host, rng, kind, keep, rotate):
    k, v = text(rng), text(rng)
    cache, fresh = (make(kind, target=target, rotate=rotate) for _ in "ab")
    seq = written(cache, to, k, v)
    cache.compact(seq, keep)
    cache.check()
    again = written(fresh, to, k[:, keep], v[:, keep]) if keep else fresh.add()
    more = text(rng, 3)
    for one, s in ((cache, seq), (fresh, again)):
        assert one.length(s) == len(keep)
        grow(one, to, s, more, more)
    # A window may have let go of what it would not have, of fewer tokens.
    first = max(0, len(keep) - 1 - 3)
    assert_same(bits(cache, host, seq, first), bits(fresh, host, again, first))
    assert_same(outputs(cache, to, host, [seq]), outputs(fresh, to, host, [again]))
    used = cache.stats().pool.used
    full, window = cache._sequences[seq].tables
    assert used == len(full) + int((window >= 0).sum())


@pytest.mark.parametrize(
    ("kind", "keep", "rotate"),
    [
        *((kind, keep, False) for kind in ("fp32", "int8") for keep in KEEPS.values()),
        ("fp32", KEEPS["holes"], True),
        ("int8", KEEPS["holes"], True),
    ],
)
def test_keys_turn_to_where_they_stand(target, to, host, rng, kind, keep, rotate):
    """Every layer holds the keys of the new positions, and the next step attends to those."""
    raw, v = text(rng), text(rng)
    was = np.stack([rotated(x, range(TOKENS)) for x in raw])
    cache = make(kind, target=target, rotate=rotate)
    seq = written(cache, to, was.astype(F32), v)
    cache.compact(seq, keep, shift=turning())
    cache.check()
    n = len(keep)
    turn = naive.rotation(Rotation(DIM).signs).T if rotate else np.eye(DIM)

    def bound(rows):  # of rows as they are quantised
        return naive_cells.loss(kind)(rows @ turn)

    for layer, window in enumerate(WINDOWS):
        there, got = keys(cache, host, seq, layer)
        assert set(range(0 if window < 0 else max(0, n - 1 - window), n)) <= set(there.tolist())
        if not len(there):
            continue
        want = rotated(raw[layer][keep][there], there)
        if kind == "fp32":
            tolerances.assert_rotated_close(got, want, kind)
        else:
            error = np.linalg.norm(got - want, axis=-1)
            assert np.all(error <= bound(was[layer][keep][there]) + bound(want))
    if kind != "fp32":
        return
    new, q = text(rng, 2), queries(2)
    step = cache.reserve([seq], [2])
    assert step.positions.tolist() == [n, n + 1]
    for layer, window in enumerate(WINDOWS):
        new_k = rotated(new[layer], [n, n + 1]).astype(F32)
        step.append(layer, to(new_k), to(new[layer]))
        at = rotated(np.concatenate([raw[layer][keep], new[layer]]), range(n + 2))
        values = np.concatenate([v[layer][keep], new[layer]])
        want, _ = naive.attention(
            q, at.transpose(1, 0, 2)[None], values.transpose(1, 0, 2)[None], [n + 2], [0, 2],
            window_left=window,
        )  # fmt: skip
        tolerances.assert_rows_close(host(step.attention(layer, to(q))), want, 3e-5)
    cache.commit(step)
    cache.check()


def test_one_token_at_a_time(rng):
    """As heavy hitters go: a token in, a token out, and layers with a window never lack what they see."""
    to = host = np.asarray
    cache = make()
    k = text(rng, 40)
    seq, kept = cache.add(), []
    for i in range(40):
        grow(cache, to, seq, k[:, i : i + 1], k[:, i : i + 1])
        kept.append(i)
        if len(kept) > 9:
            out = int(rng.integers(0, 6))
            cache.compact(seq, [j for j in range(10) if j != out])
            del kept[out]
            cache.check()
        for layer, out in enumerate(outputs(cache, to, host, [seq])):
            rows = k[layer, kept].transpose(1, 0, 2)[None]
            want, _ = naive.attention(
                queries(1), rows, rows, [len(kept)], window_left=WINDOWS[layer]
            )
            tolerances.assert_rows_close(out, want, tolerances.attention("fp32", "fp32"))
    # Each group's 9 tokens, and what the window needs of them: 4 tokens are in 3 blocks at most.
    assert cache.stats().pool.used <= 5 + 3


# ---------------------------------------------------------------- what others hold


def test_forks_and_prefixes_stay_as_they_are(target, to, host, rng):
    ids = list(range(TOKENS))
    k, v = text(rng), text(rng)
    cache = make("int8", target=target)
    a = written(cache, to, k, v, ids)
    fork = cache.fork(a)
    other = written(cache, to, k, v, ids)  # most of it from the prefix cache
    assert cache.cached_len(other) == 10
    before = bits(cache, host, fork), bits(cache, host, other)
    stores = cache.stats().pool.stores
    keep = [0, 1, 2, 3, 5, 7, 8, 9, 10]
    cache.compact(a, keep)
    cache.check()
    assert_same(bits(cache, host, fork), before[0])
    assert_same(bits(cache, host, other), before[1])
    # Blocks before the first that changed are still shared.
    mine, forked = cache._sequences[a].tables[0], cache._sequences[fork].tables[0]
    assert mine[:2].tolist() == forked[:2].tolist()
    assert not set(mine[2:]) & set(forked)
    # What follows is found by nobody, with names or without.
    more = text(rng, 5)
    grow(cache, to, a, more, more, ids=[90, 91, 92, 93, 94])
    assert cache.stats().pool.stores == stores
    for prompt, found in (([0, 1, 2, 3, 5, 7, 8], 4), ([*(keep), 90, 91, 92], 4), (ids, 10)):
        assert cache.cached_len(cache.add(prompt)) == found


def test_names_are_kept_while_there_is_room(rng):
    """The prompt's blocks stay findable, in blocks that the sequence gives back; it writes to others."""
    to, ids = np.asarray, list(range(TOKENS))
    k = text(rng, layers=1)
    cache = make(windows=[-1], num_blocks=12)
    seq = written(cache, to, k, k, ids)
    cache.compact(seq, [1, 2, 3, 9, 10])
    cache.check()
    assert cache.stats().pool.used == 3
    assert cache.cached_len(cache.add(ids)) == 10


def test_names_go_where_there_is_none(rng):
    """A sequence that fills the pool is compacted in place; its first blocks that stay as they are keep their names."""
    to, host, ids = np.asarray, np.asarray, list(range(12))
    k = text(rng, 12, layers=1)
    cache = make(windows=[-1], num_blocks=6)
    seq = written(cache, to, k, k, ids)
    assert cache.num_free == 0
    table = cache._sequences[seq].tables[0].copy()
    keep = [0, 1, 4, 5, 9, 10, 11]
    cache.compact(seq, keep)
    cache.check()
    assert cache._sequences[seq].tables[0].tolist() == table[:4].tolist()
    rows = keys(cache, host, seq, 0)[1]
    assert np.array_equal(rows, k[0, keep])
    assert cache.cached_len(cache.add(ids)) == 2
    assert cache.cached_len(cache.add([keep[i] for i in range(7)])) == 2


@pytest.mark.parametrize("rotate", [False, True])
def test_rows_lie_aside_where_only_their_own_blocks_are_free(target, to, host, rng, rotate):
    """The window's layers have no block where the kept tokens go, and those that they give back are the only ones."""
    windows = [-1, 1]
    k, v = text(rng, 12, 2), text(rng, 12, 2)
    cache, fresh = (
        make(windows=windows, num_blocks=n, target=target, rotate=rotate) for n in (8, 20)
    )
    seq = written(fresh, to, k, v)
    swapped = fresh.swap_out(seq)  # 6 + 1 blocks, without those that a prefill needs
    assert len(np.concatenate(swapped.logical)) == 7
    seq = cache.swap_in(swapped)
    blocker = cache.blocks.allocate(1)
    assert cache.num_free == 0
    keep = [0, 1, 2, 10, 11]
    cache.compact(seq, keep, turning())
    cache.blocks.release(blocker)
    cache.check()
    for layer in (0, 1):
        there, got = keys(cache, host, seq, layer)
        assert there.tolist() == ([0, 1, 2, 3, 4] if layer == 0 else [3, 4])
        want = np.array([turned(k[layer][j], i - j) for i, j in enumerate(keep)])
        tolerances.assert_rotated_close(got, want[there], "fp32")


def turned(key, offset):
    """A key that was already at some position, moved by an offset of either sign."""
    cos, sin = naive.rope_tables(64, DIM, base=100.0, dtype=np.float64)
    return naive.rope(key, cos[abs(offset)], np.sign(offset) * sin[abs(offset)], False)


def test_too_few_blocks(rng):
    to = np.asarray
    k = text(rng, 12, layers=1)
    cache = make(windows=[-1], num_blocks=7)
    seq = written(cache, to, k, k)
    fork = cache.fork(seq)
    refused(cache, numkv.CacheFull, "2 free blocks.* got 1 and 0", cache.compact, seq, [1, 2, 3])
    cache.compact(seq, [0, 2])  # one is enough for this
    cache.check()
    cache.remove(fork)
    cache.compact(seq, [1])
    cache.check()
    assert cache.stats().pool.used == 1


def test_pins_hold_what_they_held(rng):
    to, host, ids = np.asarray, np.asarray, list(range(TOKENS))
    k = text(rng)
    cache = make()
    seq = written(cache, to, k, k, ids)
    pinned = cache.pin(seq)
    content = [pool.target.to_host(pool.k)[pinned].copy() for pool in cache._pools]
    cache.compact(seq, [0, 3, 7, 8, 9, 10])
    cache.check()
    assert_same([pool.target.to_host(pool.k)[pinned] for pool in cache._pools], content)
    assert not set(pinned) & set(np.concatenate(cache._sequences[seq].tables))
    names = block_names(cache._store, np.arange(10, dtype=np.int32), None)[0]
    assert len(cache.blocks.lookup(names, ids)) == 5
    cache.unpin(seq)
    cache.check()
    assert host(cache.blocks.pin_count(pinned)).tolist() == [0] * len(pinned)


def test_pins_count_where_blocks_are_few(rng):
    """A pinned block is no place for other tokens, and is not given back; the last one, not pinned, is both."""
    to, ids = np.asarray, list(range(TOKENS))
    k = text(rng, layers=1)
    cache = make(windows=[-1], num_blocks=7)
    seq = written(cache, to, k, k, ids)
    assert len(cache.pin(seq)) == 5
    refused(
        cache, numkv.CacheFull, "3 free blocks.* got 1 and 1", cache.compact, seq, [0, 3, 7, 8, 9]
    )
    cache.compact(seq, [0, 3, 7, 8])
    cache.check()
    assert np.array_equal(keys(cache, np.asarray, seq, 0)[1], k[0, [0, 3, 7, 8]])
    assert cache.cached_len(cache.add(ids)) == 10


# ---------------------------------------------------------------- windows


def test_what_windows_have_let_go_of(rng):
    to = np.asarray
    k = text(rng, 12)
    cache = make()
    seq = written(cache, to, k, k)
    # Of 12 tokens the layers with a window of 3 hold those from 8 on.
    refused(cache, numkv.NotSupported, "newest 4 tokens", cache.compact, seq, [0, 7, 9, 10, 11])
    refused(cache, numkv.NotSupported, about("keep"), cache.compact, seq, [0, 1])
    cache.compact(seq, [0, 8, 9, 10, 11])
    cache.check()
    assert cache._sequences[seq].starts == [0, 1]
    # Token 0 shares a block with the first that is there, and is none of those that can be gone back to.
    refused(cache, numkv.NotSupported, about("length"), cache.truncate, seq, 4)
    refused(cache, numkv.NotSupported, about("keep"), cache.compact, seq, [0, 1, 2])
    cache.compact(seq, [2, 3, 4])
    cache.check()
    cache.truncate(seq, 1)
    cache.truncate(seq, 0)
    cache.check()
    assert cache._sequences[seq].starts == [0, 0]
    seq = written(cache, to, k, k)
    cache.compact(seq, [])
    assert cache.num_free == cache.num_blocks


def test_a_prefix_is_a_truncation(rng):
    """Nothing moves, and the cache goes on knowing the tokens."""
    to, ids = np.asarray, list(range(TOKENS))
    k = text(rng, layers=2)
    one, two = (make(windows=[-1, -1]) for _ in "ab")
    for cache in (one, two):
        seq = written(cache, to, k, k, ids)
        cache.fork(seq)
    one.compact(0, range(7))
    two.truncate(0, 7)
    assert state_of(one) == state_of(two)
    for cache in (one, two):
        grow(cache, to, 0, k[:, :3], k[:, :3], ids=[50, 51, 52])
        assert cache.cached_len(cache.add([*range(7), 50, 51, 52, 53])) == 10


def test_truncated_to_what_never_moved_it_is_an_ordinary_sequence(rng):
    to, ids = np.asarray, list(range(TOKENS))
    k = text(rng, layers=1)
    cache = make(windows=[-1])
    seq = written(cache, to, k, k, ids)
    cache.compact(seq, [0, 1, 2, 3, 4, 8, 9, 10])
    assert cache._sequences[seq].tokens.tolist() == [0, 1, 2, 3]
    cache.truncate(seq, 4)
    grow(cache, to, seq, k[:, 4:8], k[:, 4:8], ids=[60, 61, 62, 63])
    cache.check()
    assert cache.cached_len(cache.add([0, 1, 2, 3, 60, 61, 62, 63, 64])) == 8


# ---------------------------------------------------------------- swapping, and errors


@pytest.mark.parametrize("rotate", [False, True])
def test_swapped_out_and_in(rng, tmp_path, rotate):
    """A copy in host memory is what the sequence was then; one of a compacted sequence says what it lacks."""
    to, host = np.asarray, np.asarray
    k = text(rng, 12)
    cache = make("int8", rotate=rotate)
    seq = written(cache, to, k, k, list(range(12)))
    before, was = cache.swap_out(seq), bits(cache, host, seq)
    cache.compact(seq, [0, 1, 2, 8, 9, 10, 11])
    after = cache.swap_out(seq)
    assert after.starts == (0, 3)
    path = tmp_path / "sequences"
    save_sequences(path, [before, after])
    for swapped in ((before, after), load_sequences(path)):
        other = make("int8", rotate=rotate)
        one, two = (other.swap_in(x) for x in swapped)
        other.check()
        assert_same(bits(other, host, one), was)
        assert_same(bits(other, host, two), bits(cache, host, seq))
        assert_same(outputs(other, to, host, [two]), outputs(cache, to, host, [seq]))
        refused(other, numkv.NotSupported, about("length"), other.truncate, two, 6)
        assert other._sequences[two].tokens.tolist() == [0, 1]


def test_what_is_refused(target, to, host, rng):
    k = text(rng, layers=2)
    cache = make(windows=[-1, 3], target=target)
    seq = written(cache, to, k, k)
    keep = [0, 7, 8, 9, 10]
    for bad, error, match in (
        ([0, 11], IndexError, about("keep")),
        ([3, 3], ValueError, "rising"),
        ([[1]], numkv.DimensionMismatch, about("keep")),
        ([True] * TOKENS, numkv.UnsupportedDType, "flatnonzero"),
    ):
        refused(cache, error, match, cache.compact, seq, bad)
    for shift, error in (
        (turning(positions=6), IndexError),
        (turning(dim=2 * DIM), numkv.DimensionMismatch),
        (lambda layer, keys, offsets: keys, TypeError),
    ):
        refused(cache, error, "shift", cache.compact, seq, keep, shift)
    refused(cache, IndexError, "sequences", cache.compact, 7, [])
    step = cache.reserve([seq], [1])
    refused(cache, numkv.NumkvError, "open step", cache.compact, seq, keep)
    cache.rollback(step)
    cache.compact(seq, keep)
    cache.check()
