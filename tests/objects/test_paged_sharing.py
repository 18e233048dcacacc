"""Forks, truncation, pins and swapping of a `PagedKVCache`."""

import numpy as np
import pytest
from paged_caches import check_attention, fill, grow, make, outputs, refused, started, write

import numkv

HEADS, Q_HEADS, DIM = 2, 4, 8
KINDS = ["fp32", "fp16", "bf16", "int8", "int4"]


@pytest.fixture
def cpu():
    """`to` and `host` of tests that are about the host's bookkeeping."""
    return np.asarray, np.asarray


PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [4, 5])
def test_forks_write_apart(target, to, host, kind, length):
    """Scales too; the blocks that neither writes to stay shared."""
    cache = make(target=target, kind=kind)
    old = started(cache, to, PROMPT[:length], named=False)
    new = cache.fork(old)
    assert cache.stats().pool.used == -(-length // 2)
    texts = {old: PROMPT[:length] + [7, 7], new: PROMPT[:length] + [8]}
    grow(cache, to, new, texts[new], named=False)
    check_attention(cache, to, host, old, PROMPT[:length], kind=kind)
    grow(cache, to, old, texts[old], named=False)
    for seq, text in texts.items():
        check_attention(cache, to, host, seq, text, kind=kind)
    tables = [cache._sequences[s].tables[0][:2] for s in texts]
    assert np.array_equal(*tables)
    for seq in texts:
        cache.remove(seq)
    assert cache.num_free == cache.num_blocks
    cache.check()


def test_forks_in_one_step(target, to, host):
    cache = make(2, target=target, windows=[-1, 3])
    seqs = [started(cache, to, PROMPT[:5])]
    seqs += [cache.fork(seqs[0]) for _ in range(3)]
    texts = [PROMPT[:5] + [n] * n for n in range(4)]
    step = cache.reserve(seqs, [0, 1, 2, 3])
    write(step, to, texts, [5] * 4)
    cache.commit(step, token_ids=[1, 2, 2, 3, 3, 3])
    cache.check()
    for seq, text in zip(seqs, texts, strict=True):
        check_attention(cache, to, host, seq, text)


def test_a_cut_block_keeps_what_it_is_found_by(target, to, host):
    """A sequence that is cut within a findable block, and goes on in another way, writes elsewhere."""
    cache = make(target=target, block_size=4)
    seq = started(cache, to, PROMPT)
    cache.truncate(seq, 6)
    other = [*PROMPT[:6], 0, 0, 0]
    grow(cache, to, seq, other)
    check_attention(cache, to, host, seq, other)
    for text in (PROMPT, other):
        again = cache.add(text)
        assert cache.cached_len(again) == 8
        grow(cache, to, again, text)
        check_attention(cache, to, host, again, text)


def test_truncation_gives_blocks_back(cpu):
    to, host = cpu
    cache = make()
    seq = started(cache, to, PROMPT)
    for length in (9, 8, 7, 3, 0):
        cache.truncate(seq, length)
        assert cache.stats().pool.used == -(-length // 2)
        check_attention(cache, to, host, seq, PROMPT[:length]) if length else None
    for bad in (-1, 1):
        refused(cache, IndexError, "`length`", cache.truncate, seq, bad)


def test_truncation_stops_where_a_window_has_moved_on(cpu):
    to, host = cpu
    cache = make(2, windows=[-1, 3])
    seq = started(cache, to, PROMPT)  # the window of the last one begins in block 2
    refused(cache, numkv.NotSupported, "`length`: .*window of 3", cache.truncate, seq, 7)
    cache.truncate(seq, 8)
    check_attention(cache, to, host, seq, PROMPT[:8])
    grow(cache, to, seq, [*PROMPT[:8], 0, 0])
    check_attention(cache, to, host, seq, [*PROMPT[:8], 0, 0])
    cache.truncate(seq, 0)
    assert cache.stats().pool.used == 0


@pytest.mark.parametrize("chunk", [1, 7, 1000])
def test_sliding_layers_have_a_footprint_of_their_own(cpu, chunk):
    to, host = cpu
    cache = make(4, windows=[-1, 8, -1, 8], block_size=4, num_blocks=500)
    seq = cache.add()
    zeros = np.zeros((chunk, HEADS, DIM), np.float32)
    for n in range(0, 1000, chunk):
        m = min(chunk, 1000 - n)
        step = cache.reserve([seq], [m])
        for layer in range(4):
            step.append(layer, zeros[:m], zeros[:m])
        cache.commit(step)
    held = [int((t >= 0).sum()) for t in cache._sequences[seq].tables]
    assert held == [250, 3]
    assert cache.stats().pool.used == 253


def test_pins_outlive_pressure_and_the_sequence(cpu):
    to, host = cpu
    cache = make(num_blocks=12)
    seq, other = started(cache, to, PROMPT), started(cache, to, [8] * 5)
    ids = cache.pin(seq)
    assert len(ids) == cache.stats().pool.pinned == 4
    cache.remove(seq)
    cache.remove(other)
    assert cache.num_free == 8
    squeeze = cache.add()
    fill(cache, [squeeze], 16)
    assert cache.stats().pool.evictions == 2
    with pytest.raises(numkv.CacheFull):
        cache.reserve([squeeze], 1)
    assert cache.cached_len(cache.add([8] * 5)) == 0
    again = cache.add(PROMPT)
    assert cache.cached_len(again) == 8
    check_attention(cache, to, host, again, PROMPT[:8])
    cache.remove(again)
    cache.blocks.unpin(ids)
    fill(cache, [squeeze], 8)
    assert cache.num_free == 0
    cache.check()


def test_pins_are_taken_back_as_they_were(cpu):
    """Whatever the sequence has done since."""
    to, _ = cpu
    cache = make()
    seq = started(cache, to, PROMPT[:5])
    cache.pin(seq)
    grow(cache, to, seq, PROMPT)
    cache.pin(seq)
    assert cache.stats().pool.pinned == 4
    cache.truncate(seq, 1)
    cache.unpin(seq)
    assert cache.stats().pool.pinned == 2
    cache.unpin(seq)
    assert cache.stats().pool.pinned == 0
    refused(cache, numkv.NumkvError, "`seq`: expected a pinned sequence", cache.unpin, seq)


@pytest.mark.parametrize("kind", KINDS)
def test_swapping_to_another_cache(target, to, host, kind):
    """Bit for bit, to a cache of another size, and its prefix is findable there."""
    options = {"layers": 4, "windows": [-1, 3, -1, 3], "kind": kind, "target": target}
    cache, other = make(**options), make(num_blocks=40, **options)
    started(other, to, [7, 7, 7])
    seq = started(cache, to, PROMPT)
    before = outputs(cache, to, host, [seq])
    swapped = cache.swap_out(seq)
    assert swapped.length == 9
    assert swapped.tokens.tolist() == PROMPT
    row_bytes = sum(numkv.kind(kind).bytes_per_token(HEADS, DIM) for _ in range(2))
    assert swapped.nbytes == (5 + 3) * 2 * row_bytes
    cache.remove(seq)
    moved = other.swap_in(swapped)
    other.check()
    assert np.array_equal(outputs(other, to, host, [moved]), before)
    text = [*PROMPT, 7, 8]
    grow(other, to, moved, text)
    check_attention(other, to, host, moved, text, kind=kind)
    assert other.cached_len(other.add(PROMPT)) == 8
    empty = other.swap_in(other.swap_out(other.add()))
    assert other.length(empty) == 0


@pytest.mark.parametrize(
    "other",
    [
        {"layers": 3},
        {"block_size": 4},
        {"kind": "fp16"},
        {"v_kind": "int8"},
        {"windows": [-1, 3]},
        {"head_dim_v": 4},
    ],
)
def test_swapping_needs_the_same_geometry(cpu, other):
    cache = make()
    swapped = cache.swap_out(started(cache, cpu[0], PROMPT))
    other = make(**other)
    refused(other, numkv.DimensionMismatch, "`swapped`", other.swap_in, swapped)


def test_swapping_into_a_full_cache(cpu):
    cache, other = make(), make(num_blocks=4)
    swapped = cache.swap_out(started(cache, cpu[0], PROMPT))
    refused(other, numkv.CacheFull, "blocks", other.swap_in, swapped)


def test_stats(cpu):
    to, _ = cpu
    cache = make(4, windows=[-1, 3, -1, 3], block_size=4, num_blocks=30)
    seq = started(cache, to, PROMPT)
    cache.fork(seq)
    stats = cache.stats()
    assert (stats.num_seqs, stats.num_tokens, stats.unused_slots) == (2, 18, 6)
    pool = stats.pool
    assert (pool.num_blocks, pool.used, pool.free, pool.cached) == (30, 5, 25, 4)
    assert len(cache) == 2


DAMAGES = {
    "a block less": lambda s: {"tables": [s.tables[0][:-1]]},
    "a block more": lambda s: {"tables": [np.append(s.tables[0], np.int32(9))]},
    "a block twice": lambda s: {"tables": [s.tables[0][[0, 0, *range(2, len(s.tables[0]))]]]},
    "a block that is not there": lambda s: {"tables": [np.append(s.tables[0][:-1], np.int32(99))]},
    "longer": lambda s: {"length": s.length + 2},
    "negative": lambda s: {"length": -1},
    "starts": lambda s: {"starts": [3]},
    "more ids than tokens": lambda s: {"length": 1, "tables": [s.tables[0][:1]]},
    "more names than ids": lambda s: {"registered": s.registered + 1},
    "a name less": lambda s: {"digests": [s.digests[0][:-1]]},
    "other names": lambda s: {"digests": [s.digests[0][::-1]]},
    "other ids": lambda s: {"tokens": s.tokens[::-1]},
    "half moved": lambda s: {"dropped": s.dropped | 1},
    "cached": lambda s: {"cached": s.length + 1},
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_check_finds_what_does_not_add_up(cpu, damage):
    cache = make()
    seq = started(cache, cpu[0], PROMPT)
    cache.check()
    state = cache._sequences[seq]
    cache._sequences[seq] = state._replace(**DAMAGES[damage](state))
    with pytest.raises(numkv.NumkvError, match=r"sequence 0|block"):
        cache.check()
    cache._sequences[seq] = state
    cache.check()


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_check_finds_scales_that_are_not_finite(target, to, kind):
    """Of tokens that are there; what unused slots hold is nobody's business."""
    cache = make(kind=kind, target=target, num_blocks=8)
    seq = cache.add()
    fill(cache, [seq], 3)
    pool = cache._pools[1]
    scales = pool.target.to_host(pool.v_scale).copy()
    slot = cache.block_table(seq, 1)[1], 0
    for token, sound in ((1, True), (0, False)):  # the fourth slot is empty
        scales[slot[0], 1, token] = (
            np.inf if scales.dtype.kind == "f" else np.iinfo(scales.dtype).max
        )
        pool.v_scale[:] = to(scales)
        if sound:
            cache.check()
            continue
        with pytest.raises(numkv.NumkvError, match=r"layer 1: expected finite scales.*`v`"):
            cache.check()


def test_a_block_of_one_sequence_is_written_in_place():
    """Nobody else uses it: no copy is made, and no block needed for one."""
    cache = make(1, num_blocks=1, block_size=4)
    seq = cache.add()
    for length in range(1, 5):
        fill(cache, [seq], 1)
        assert cache.length(seq) == length
        assert cache.block_table(seq, 0).tolist() == [0]
        cache.check()


def test_little_is_left_unused(rng):
    """1,000 sequences of 200 tokens on average, in blocks of 16: less than 4% of the slots hold no token."""
    cache = numkv.PagedKVCache(1, 1, 1, num_blocks=20000, block_size=16, kind="int8")
    lens = rng.integers(1, 400, 1000)
    assert abs(lens.mean() - 200) < 10
    seqs = [cache.add() for _ in lens]
    for part in range(0, 1000, 100):
        fill(cache, seqs[part : part + 100], lens[part : part + 100])
    stats = cache.stats()
    slots = stats.pool.used * 16
    assert stats.num_tokens == lens.sum()
    assert stats.unused_slots == slots - lens.sum()
    assert stats.unused_slots / slots < 0.04
