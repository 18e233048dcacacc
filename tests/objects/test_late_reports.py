"""What objects on CUDA do about rows that turn out to be NaN or infinite after the call that wrote them is over."""

import contextlib

import naive
import numpy as np
import pytest

import numkv
from numkv import targets

pytestmark = pytest.mark.kernels

HEADS, DIM = 2, 32
F32 = np.float32
cuda = targets.get("cuda")
to, host = cuda.asarray, cuda.to_host


def good(n=1, seed=0):
    return np.random.default_rng((n, seed)).standard_normal((n, HEADS, DIM)).astype(F32)


def bad(n=1, at=(0, 1, 5), value=np.nan, seed=0):
    x = good(n, seed)
    x[at] = value
    return x


def refused(position, call, index=None):
    """A call tells of a token, at this position, and changes nothing."""
    with pytest.raises(numkv.NonFiniteInput, match=f"truncate.* to {position} tokens") as caught:
        call()
    if index is not None:
        assert caught.value.index == index


@contextlib.contextmanager
def unseen(watch):
    """Within, nothing has been reported yet to who does not wait: as if the device were behind."""
    watch.arrived = lambda: False
    try:
        yield
    finally:
        del watch.arrived


# ---------------------------------------------------------------- full-precision windows


def layer(window=4, sinks=1, **more):
    return numkv.ContiguousLayer(
        64, HEADS, DIM, kind="int8", target="cuda", full_precision=numkv.FullPrecision(window, sinks),
        **more,
    )  # fmt: skip


@pytest.mark.parametrize("side", [0, 1])
@pytest.mark.parametrize(("n", "at"), [(1, 0), (3, 1), (12, 0), (12, 4), (12, 11)])
def test_a_bad_row_in_a_window(side, n, at):
    """Whether it goes to the window, is a first token, or passes both: it is zeros, and said with its own index."""
    made, rows = layer(), [good(n), good(n, 1)]
    rows[side] = bad(n, (at, 1, 5), np.inf, seed=side)
    made.append(*map(to, rows))
    stored = host((made.k, made.v)[side]), host((made.k_scale, made.v_scale)[side])
    of = made.quantised_tokens
    refused(at, lambda: made.append(to(good()), to(good())), (at, 1, 5))
    refused(at, made.check, (at, 1, 5))
    refused(at, lambda: made.reserve(1))
    floats = host((made._full_precision._pool.k, made._full_precision._pool.v)[side])
    if at in of:
        assert not stored[0][0, 1, at].any()
        assert stored[1][0, 1, at] == 0
    assert np.isfinite(floats).all()
    made.truncate(at)
    assert made.seq_len == at
    made.append(to(good()), to(good()))
    made.check()


def test_a_bad_row_leaves_the_window_as_zeros():
    """Nobody looks in between: the row moves to the quantised part, and is what it was there."""
    made = layer(window=2, sinks=0)
    made.append(to(good(3)), to(good(3)))
    with unseen(made._reports.watch):
        made.append(to(bad()), to(good()))
        for seed in range(4):
            made.append(to(good(seed=seed)), to(good(seed=seed)))
    assert 3 in made.quantised_tokens
    assert host(made.k_scale)[0, 1, 3] == 0
    assert not host(made.k)[0, 1, 3].any()
    assert np.isfinite(host(made.decode_attention(to(good(1))))).all()
    refused(3, made.check, (0, 1, 5))
    made.truncate(3)
    made.append(to(good()), to(good()))
    made.check()


@pytest.mark.parametrize("kinds", [("int8", "fp16"), ("fp16", "int8")], ids="-".join)
def test_only_what_is_quantised_is_looked_at_in_a_window(kinds):
    made = layer(k_kind=kinds[0], v_kind=kinds[1])
    rows = [good(3), good(3)]
    rows[kinds.index("fp16")][1, 0, 2] = np.inf
    made.append(*map(to, rows))
    made.append(to(good()), to(good()))
    made.check()
    rows = [good(3), good(3)]
    rows[kinds.index("int8")][1, 0, 2] = np.inf
    made.append(*map(to, rows))
    refused(5, made.check, (1, 0, 2))


def test_unchecked_rows_are_not_looked_at_in_a_window():
    made = layer()
    made.append(to(bad()), to(good()), check_finite=False)
    made.append(to(good()), to(good()))


@pytest.mark.parametrize("rotate", [False, True])
def test_projections_into_a_window(rotate):
    made = layer(rotate=rotate)
    qkv = np.random.default_rng(1).standard_normal((9, 6 * DIM)).astype(F32)
    qkv[5, 4 * DIM + 3] = np.nan  # of V
    out = made.write(to(qkv), num_q_heads=2, qk_mode=0)
    assert np.isfinite(host(out)).all()
    with pytest.raises(numkv.NonFiniteInput, match=r"`qkv`.*truncate to 5 tokens") as caught:
        made.check()
    assert caught.value.index == (5,)


def test_a_cache_with_windows():
    """Of several layers: what one of them is told of holds for all."""
    cache = numkv.KVCache(
        2, HEADS, DIM, kind="int8", target="cuda", full_precision=numkv.FullPrecision(4)
    )
    for layer_ in range(2):
        cache.append(layer_, to(good(6)), to(good(6)))
    cache.advance(6)
    cache.append(0, to(good()), to(good()))
    cache.append(1, to(good()), to(bad()))
    refused(6, lambda: cache.advance(1), (0, 1, 5))
    cache.truncate(6)
    for layer_ in range(2):
        cache.append(layer_, to(good()), to(good()))
    cache.advance()
    cache.check()


def test_a_bound_call_with_a_window():
    made = layer()
    call, q = made.bind(HEADS), good()
    call(to(q), to(good()), to(good()))
    call(to(q), to(good()), to(bad()))
    refused(1, lambda: call(to(q), to(good()), to(good())))


# ---------------------------------------------------------------- copies, forks, and rows that move


def pending(make):
    """A cache of 8 tokens, of which the one at position 3 turns out to be bad when somebody looks."""
    made = make()
    made.append(to(good(3)), to(good(3)))
    made.append(to(bad(5)), to(good(5)))
    return made


PLAIN = pytest.mark.parametrize("make", [
    lambda: numkv.ContiguousLayer(32, HEADS, DIM, kind="int8", target="cuda"),
    lambda: numkv.PagedLayer(8, 4, HEADS, DIM, kind="int8", target="cuda"), layer,
], ids=["contiguous", "paged", "window"])  # fmt: skip


@PLAIN
def test_a_copy_is_told_too(make):
    made = pending(make)
    other = made.copy()
    made.truncate(3)
    made.check()
    refused(3, other.check, (0, 1, 5))
    refused(3, lambda: other.append(to(good()), to(good())))
    other.truncate(2)
    other.append(to(good()), to(good()))
    other.check()


@PLAIN
@pytest.mark.parametrize(("kept", "position"), [
    ([0, 1, 2, 3, 4], 3), ([0, 3, 7], 1), ([1, 5, 6], 1), ([0, 1, 2], None), ([], None), ([3], 0),
])  # fmt: skip
@pytest.mark.parametrize("known", [False, True])
def test_compaction_of_what_was_bad(make, kept, position, known):
    """Tokens behind a bad one count as bad, as not each of them is told."""
    made = pending(make)
    if known:
        refused(3, lambda: made.append(to(good()), to(good())))
    made.compact(kept)
    if position is None:
        made.append(to(good()), to(good()))
        made.check()
    else:
        refused(position, made.check)
        made.truncate(position)
        made.append(to(good()), to(good()))
        made.check()


def test_of_two_objects_each_is_told(tmp_path):
    a, b, c = layer(), layer(), layer()
    a.append(to(bad()), to(good()))
    b.append(to(good()), to(good()))
    c.append(to(good()), to(bad(at=(0, 0, 1))))
    refused(0, a.check, (0, 1, 5))
    refused(0, c.check, (0, 0, 1))
    b.check()
    for made in (a, c):
        with pytest.raises(numkv.NonFiniteInput):
            numkv.save(tmp_path / "file", made)
    with numkv.on_stream(0):
        numkv.save(tmp_path / "file", b)
        assert numkv.load(tmp_path / "file", target="cuda").seq_len == 1
        assert numkv.load(tmp_path / "file").seq_len == 1


def paged(blocks=16, block_size=4):
    return numkv.PagedKVCache(
        1, HEADS, DIM, num_blocks=blocks, block_size=block_size, kind="int8", target="cuda"
    )


def step(cache, seqs, rows, token_ids=None, commit=True):
    n = len(rows) // len(seqs)
    made = cache.reserve(seqs, n)
    made.append(0, to(rows), to(good(len(rows))))
    if commit:
        cache.commit(made, token_ids=token_ids)
    return made


def test_forks_are_told_of_what_they_share():
    cache = paged()
    seq = cache.add()
    step(cache, [seq], good(5))
    with unseen(cache._store.reports.watch):
        early = cache.fork(seq)
        step(cache, [seq], bad(3, (1, 1, 5)))  # position 6
        late = cache.fork(seq)
        of_fork = cache.fork(late)
        cut = cache.fork(seq)
        cache.truncate(cut, 6)
        step(cache, [cut], good(2))
        cache.remove(seq)
    for told in (late, of_fork):
        refused(6, lambda seq=told: cache.reserve([seq], 1))
    with pytest.raises(numkv.NonFiniteInput):
        cache.check()
    with pytest.raises(numkv.NonFiniteInput):
        cache.swap_out(late)
    for seq in (early, cut):
        step(cache, [seq], good(1))
    after = cache.fork(late)
    refused(6, lambda: cache.reserve([after], 1))
    copied = cache.copy()
    refused(6, lambda: copied.reserve([late], 1))
    for of, seqs in ((cache, (late, of_fork, after)), (copied, (late, of_fork, after))):
        for seq in seqs:
            of.truncate(seq, 6)
            step(of, [seq], good(1))
        of.check()


def test_what_was_truncated_before_it_was_told_is_forgotten():
    cache = paged()
    seq = cache.add()
    with unseen(cache._store.reports.watch):
        step(cache, [seq], bad(3, (1, 1, 5)))
        cache.truncate(seq, 1)
        step(cache, [seq], good(4))
    step(cache, [seq], good(1))
    cache.check()


def test_compaction_of_a_sequence_of_many():
    cache = paged()
    seq = cache.add()
    with unseen(cache._store.reports.watch):
        step(cache, [seq], bad(8, (3, 1, 5)))
        cache.compact(seq, [1, 2, 5, 6])
    refused(2, lambda: cache.reserve([seq], 1))
    cache.compact(seq, [0, 1])
    step(cache, [seq], good(1))
    cache.check()


def test_a_prefix_with_a_bad_row_is_found_by_nobody():
    """Who has found it is told; nobody finds it again."""
    cache, ids = paged(), np.arange(12)
    seq = cache.add(ids)
    with unseen(cache._store.reports.watch):
        step(cache, [seq], bad(12, (6, 1, 5)), token_ids=ids)
        other = cache.add(ids)
    assert cache.cached_len(other) == 8
    refused(6, lambda: cache.reserve([other], 1))
    cache.remove(seq)
    cache.remove(other)
    again = cache.add(ids)
    assert cache.cached_len(again) == 4
    step(cache, [again], good(8), token_ids=ids[4:])
    cache.check()
    assert cache.cached_len(cache.add(ids)) == 11


def test_check_tells_of_open_steps():
    cache = paged()
    seq = cache.add()
    step(cache, [seq], good(2))
    opened = step(cache, [seq], bad(), commit=False)
    with pytest.raises(numkv.NonFiniteInput, match="truncate sequence 0 to 2 tokens"):
        cache.check()
    cache.rollback(opened)
    cache.check()
    step(cache, [seq], good(1))


def test_a_failed_reserve_counts_nothing(monkeypatch):
    cache = paged()
    seqs = [cache.add(), cache.add()]
    step(cache, seqs, good(6))
    before = cache.blocks.stats()

    def fail(*args):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("numkv.caches.paged.reservation.Step", fail)
        with pytest.raises(MemoryError):
            cache.reserve(seqs, 20)
    assert cache.blocks.stats() == before
    step(cache, seqs, good(6))
    assert cache.blocks.stats().allocations == before.allocations + 2


# ---------------------------------------------------------------- cells


def cells(make=numkv.CausalCache, **more):
    cache = make(**more)
    cache.init("int8", 3, 16, 8, "cuda")
    return cache


def forward(cache, positions, sequences, rows, layers=(0,)):
    cache.start_forward(numkv.Batch(positions, sequences))
    for number in layers:
        cache.put(number, to(rows), to(good(len(rows))))


def told_of(seq, position, call, index=None):
    match = f"remove sequence {seq} from position {position} on"
    with pytest.raises(numkv.NonFiniteInput, match=match) as caught:
        call()
    if index is not None:
        assert caught.value.index == index


def test_a_bad_token_of_cells():
    cache = cells()
    forward(cache, [0, 1, 0], [0, 0, 1], good(3))
    forward(cache, [2, 1, 0], [0, 1, 2], bad(3, (1, 1, 5), np.inf))
    q = host(cache.decode_attention(0, to(good(3))))
    assert np.isfinite(q).all()
    told_of(1, 1, lambda: cache.put(0, to(good(3)), to(good(3))), (1, 1, 5))
    told_of(1, 1, cache.check)
    told_of(1, 1, lambda: forward(cache, [3, 2], [0, 1], good(2)))
    assert cache.positions(0).tolist() == [0, 1, 2]  # nothing has changed
    forward(cache, [3, 1], [0, 2], good(2))  # others go on
    cache.copy_prefix(1, 0, 2)
    told_of(0, 1, lambda: forward(cache, [2], [0], good(1)))
    cache.remove(0, 1)
    cache.remove(1, 1)
    forward(cache, [1, 1], [0, 1], good(2))
    cache.check()


def test_a_cell_that_gets_another_token_is_forgotten():
    cache = cells()
    forward(cache, [0, 1], [0, 0], good(2))
    forward(cache, [2], [0], bad())
    cache.remove(0, 2)
    forward(cache, [2], [0], good())
    cache.check()
    forward(cache, [0], [1], bad())
    cache.clear()
    forward(cache, [0], [1], good())
    cache.check()


def test_cells_behind_a_bad_one_count_as_bad():
    """Of two that were bad one is told; removing it alone does not do."""
    cache = cells(shift=lambda layer, keys, offsets: keys)
    forward(cache, [0, 1], [0, 0], good(2))
    with unseen(cache._reports.watch):
        forward(cache, [2], [0], bad())
        forward(cache, [3], [0], bad())
    told_of(0, 2, lambda: forward(cache, [4], [0], good()))
    cache.remove(0, 2, 3)
    told_of(0, 2, lambda: forward(cache, [3], [0], good()))
    cache.remove(0, 2)
    forward(cache, [2], [0], good())
    cache.check()


def test_a_copy_of_cells_is_told_too():
    cache = cells()
    forward(cache, [0, 1], [0, 0], bad(2, (1, 1, 5)))
    other = cache.copy()
    cache.remove(0, 1)
    cache.check()
    told_of(0, 1, other.check)
    other.remove(0, 1)
    forward(other, [1], [0], good())
    other.check()


def test_children_of_a_wrapper_are_told(tmp_path):
    """Nothing of a pass begins where one child refuses it."""
    cache = numkv.WrapperCache(
        numkv.CausalCache(window_left=4), numkv.CausalCache(), layer_types=[0, 1]
    )
    cache.init("int8", 1, 16, 4, "cuda")
    cache.start_forward(numkv.Batch([0, 1], [0, 0]))
    cache.put(0, to(good(2)), to(good(2)))
    cache.put(1, to(bad(2, (1, 0, 3))), to(good(2)))
    before = cache.positions(0)
    told_of(0, 1, lambda: cache.start_forward(numkv.Batch([2], [0])), (1, 0, 3))
    told_of(0, 1, lambda: numkv.save(tmp_path / "file", cache))
    assert [x.tolist() for x in cache.positions(0)] == [x.tolist() for x in before]
    cache.remove(0, 1)
    cache.start_forward(numkv.Batch([1], [0]))
    cache.check()


# ---------------------------------------------------------------- an encoder's rows


def encoder():
    cache = numkv.EncoderCache()
    cache.init("int8", 1, 16, 4, "cuda")
    cache.start_forward(numkv.Batch([0, 1], [0, 0], multimodal=[1]))
    return cache


def test_a_bad_row_of_an_encoder():
    cache = encoder()
    cache.put(0, to(good(5)), to(bad(5, (2, 1, 5))))
    for call in (
        lambda: cache.put(1, to(good(5)), to(good(5))), cache.check,
        lambda: cache.start_forward(numkv.Batch([2], [0])),
    ):  # fmt: skip
        with pytest.raises(numkv.NonFiniteInput, match=r"`v`.*put layer 0 anew") as caught:
            call()
        assert caught.value.index == (2, 1, 5)
    _, v, _ = cache.get(0)
    assert not host(v)[2, 1].any()
    copied = cache.copy()
    cache.put(0, to(good(5)), to(good(5)))
    cache.put(1, to(good(5)), to(good(5)))
    cache.check()
    with pytest.raises(numkv.NonFiniteInput):
        copied.check()
    copied.remove(0, 1)
    copied.start_forward(numkv.Batch([1], [0], multimodal=[0]))
    for number in range(2):
        copied.put(number, to(good(3)), to(good(3)))
    copied.check()


def test_an_item_that_is_removed_before_it_was_told():
    cache = encoder()
    cache.put(0, to(bad(5)), to(good(5)))
    cache.remove(0, 1)
    cache.check()
    cache.start_forward(numkv.Batch([1], [0], multimodal=[0]))
    cache.put(0, to(good(5)), to(bad(5)), check_finite=False)
    cache.put(1, to(good(5)), to(good(5)))


# ---------------------------------------------------------------- against what is expected


def test_other_rows_of_a_window_are_as_ever():
    """The bad token counts as zeros; all others are what they are without it."""
    made, k, v = layer(window=3, sinks=0), good(10, 3), good(10, 4)
    with_bad = k.copy()
    with_bad[8, 0] = np.nan
    made.append(to(with_bad), to(v))
    k[8, 0] = 0
    q = good(1, 5)
    rows = []
    for x in (k, v):
        stored = naive.dequantise(*naive.quantise(x, "int8"))
        stored[7:] = x[7:]
        rows.append(np.swapaxes(stored, 0, 1)[None])
    wanted = naive.attention(q, *rows, [10], [0, 1])[0]
    np.testing.assert_allclose(host(made.decode_attention(to(q))), wanted, atol=1e-4)
