"""How attention on CUDA splits sequences: by nothing but themselves, and never more than there is room for."""

import numpy as np
from walked import each

from numkv.kernels.cuda.attention import items, splits

STEP, NO_RANGES = items.SPLIT_STEP, np.zeros((0, 2), np.int64)
H200 = items.splitting(132)


def batch_of(lengths, tokens, heads, group, window_left, capacity, room, ranges=NO_RANGES):
    """What a kernel knows of sequences of so many tokens and queries."""
    starts = np.concatenate([[0], np.cumsum(tokens)]).astype(np.int32)
    return items.AttentionBatch(
        np.array(lengths, np.int32), starts, ranges, int(starts[-1]), capacity, window_left, group, heads,
        room.slots, room.by_token, int(starts[-1]), room.how,
    )  # fmt: skip


def random_call(rng):
    """Heads, and the lengths and queries of some sequences."""
    heads, group = int(rng.choice([1, 2, 3, 8, 32])), int(rng.choice([1, 4, 7, 8, 16]))
    count = int(rng.integers(1, 6))
    tokens = rng.choice([1, 1, 1, 2, 5, 16, 40, 300], count)
    lengths = (tokens + rng.integers(0, 2 ** rng.integers(1, 13), count) * STEP // 16).tolist()
    window_left = int(rng.choice([-1, -1, 0, 5 * STEP, 70 * STEP]))
    return lengths, tokens.tolist(), heads, group, window_left


@each("seed", range(200))
def test_parts_have_room_and_lie_apart(seed):
    rng = np.random.default_rng(seed)
    lengths, tokens, heads, group, window_left = random_call(rng)
    how = items.splitting(int(rng.choice([1, 20, 58, 108, 132, 188, 1000])))
    capacity = max(lengths) + 3
    num_tokens, num_seqs = sum(tokens), len(lengths)
    room = splits.room_for(num_tokens, num_seqs, heads, group, capacity, window_left, how)
    batch = batch_of(lengths, tokens, heads, group, window_left, capacity, room)
    found = [items.extent(batch, b) for b in range(num_seqs)]
    endless = batch._replace(slots=1 << 40)
    _, _, _, _, _, describe = items.make_items(8)
    taken = set()
    for b, own in enumerate(found):
        if room.slots:  # none was refused
            assert own == items.extent(endless, b)
        else:
            assert items.extent(endless, b).splits == 1
        assert 1 <= own.splits <= room.splits
        if own.splits == 1:
            continue
        for h in range(heads):
            for row in range(0, own.tokens * group, 8):
                count = min(8, own.tokens * group - row)
                item = items.AttentionItem(
                    b, own.start, 0, row, count, h, 0, own.splits, 0, 1, 0, 1
                )
                rows = items.ItemRows(*np.zeros((5, 8), np.int64))
                for thread in range(count):
                    describe(batch, item, rows, thread)
                for first in rows.part[:count]:
                    parts = range(int(first), int(first) + own.splits)
                    assert parts.start >= 0
                    assert parts.stop <= room.rows
                    assert taken.isdisjoint(parts)
                    taken.update(parts)


@each("seed", range(50))
def test_splits_depend_on_the_sequence_alone(seed):
    lengths, tokens, heads, group, window_left = random_call(np.random.default_rng(seed))
    capacity = max(lengths)

    def extents(lengths, tokens, capacity):
        call = sum(tokens), len(lengths), heads, group, capacity, window_left, H200
        batch = batch_of(
            lengths, tokens, heads, group, window_left, capacity, splits.room_for(*call)
        )
        return [items.extent(batch, b) for b in range(len(lengths))]

    for b, own in enumerate(extents(lengths, tokens, capacity)):
        (alone,) = extents(lengths[b : b + 1], tokens[b : b + 1], lengths[b] + 7 * STEP)
        if own.splits > 1 or alone.splits > 1:
            assert alone[3:] == own[3:]


def test_every_token_is_in_one_split():
    for how in map(items.splitting, (4, 60, 132)):
        for span in range(2 * STEP, 3000, 37):
            for rows in (1, 8, 100):
                length = int(items.split_length(span, rows, 2, how))
                assert length % STEP == 0
                assert length >= max(rows * items.TOKENS_PER_ROW, items.LEAST_SPLIT)
                assert -(-span // length) <= splits.most_splits(span, rows, 2, how)


def test_starts_that_do_not_fit_split_nothing():
    """What the device says is not trusted: parts never go where there is no room."""
    room = splits.room_for(2, 2, 1, 1, 4096, -1, H200)
    batch = batch_of([4096, 4096], [1, 1], 1, 1, -1, 4096, room)
    assert items.extent(batch, 0).splits > 1
    both = batch._replace(
        q_starts=np.array([0, 2, 2], np.int32), by_token=False, slots=room.slots - 1
    )
    assert items.extent(both, 0).splits == 1
    for starts in ([-1, 0, 1], [3, 4, 5], [1, 0, 2]):
        broken = batch._replace(q_starts=np.array(starts, np.int32))
        assert items.extent(broken, 0).tokens == 0


def test_one_kv_head_fills_the_machine_and_many_split_less():
    pieces = 1 << H200.log_items
    assert splits.most_splits(1 << 17, 8, 1, H200) == pieces
    assert splits.most_splits(1 << 17, 4, 8, H200) == pieces // 8
    assert splits.most_splits(1 << 17, 1, 256, H200) == 1
    # Nothing can be split: one launch.
    assert splits.room_for(1, 1, 8, 4, STEP, -1, H200).slots == 0
    assert splits.room_for(4096, 1, 8, 4, 1 << 17, -1, H200).slots == 0


@each(
    "multiprocessors, expected",
    [(1, 2), (20, 32), (58, 128), (90, 128), (91, 256), (108, 256), (132, 256), (181, 256), (182, 512), (1000, 512)],
)  # fmt: skip
def test_a_long_sequence_has_about_two_items_for_each_multiprocessor(multiprocessors, expected):
    how = items.splitting(multiprocessors)
    assert 1 << how.log_items == expected
    for heads in (1, 2, 8):
        span = 1 << 20
        length = int(items.split_length(span, 4, heads, how))
        assert heads * -(-span // length) == max(heads, expected)


def test_a_sequence_of_eight_heads_uses_the_device():
    """Of 8,192 tokens 128 of the 132 multiprocessors of an H200 have work; longer ones have no more than 32 splits."""
    for pieces, expected in ((8, 8), (16, 16), (32, 32), (64, 32), (256, 32)):
        span = pieces * items.LEAST_SPLIT
        assert -(-span // int(items.split_length(span, 4, 8, H200))) == expected


def test_memory_of_parts_is_a_small_share_of_the_cache():
    """Whatever the batch: two parts of a row at most for `TOKENS_PER_ROW` tokens, here in bfloat16."""
    for num_seqs in (1, 8, 256):
        for tokens in (1, 4, 16, 32):
            for heads, group in ((8, 4), (1, 8), (32, 1)):
                capacity = 1024 * STEP // 16
                room = splits.room_for(
                    num_seqs * tokens, num_seqs, heads, group, capacity, -1, H200
                )
                parts = room.rows * (128 + splits.PART_EXTRA) * 4 if room.slots else 0
                cache = num_seqs * capacity * heads * 2 * 128 * 2
                assert parts <= 2.1 / items.TOKENS_PER_ROW * cache


def test_memory_of_parts_does_not_grow_with_the_length():
    """A token has parts of each q head of a group for the items of one sequence: 0.5 MB, whatever its length."""
    for capacity in (1 << 15, 1 << 17, 1 << 20):
        room = splits.room_for(256, 256, 8, 4, capacity, -1, H200)
        assert room.rows == 256 * 4 << H200.log_items
