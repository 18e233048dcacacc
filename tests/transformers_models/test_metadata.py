"""The metadata of a cache layer, against lists of tokens, under random programs."""

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers", minversion="5.0")

from numkv.errors import DimensionMismatch, NotSupported
from numkv.transformers.metadata import BatchMetadata, Seen


class Model:
    """A pool of numbers, one a token, and beside it lists of what each sequence holds."""

    def __init__(self, batch, block_size, reach, num_blocks=1):
        self.metadata = BatchMetadata.empty(batch, block_size, num_blocks, reach)
        self.pool = np.full((num_blocks, block_size), -1)
        self.tokens = [[] for _ in range(batch)]
        self.columns = [[] for _ in range(batch)]
        self.next = 0

    def move(self, num_blocks, source, to):
        pool, self.pool = self.pool, np.full((num_blocks, self.pool.shape[1]), -1)
        self.pool[to] = pool[source]

    def advance(self, new, seen, keep):
        mask = np.concatenate([np.array(self.columns, bool).reshape(len(new), -1), new], 1)
        more = self.metadata.more(mask, new.shape[1])
        if more and self.metadata.used + more > self.metadata.num_blocks:
            self.metadata, move = self.metadata.packed(self.metadata.used + more)
            self.move(*move)
        step = self.metadata.advance(mask, new.shape[1], seen, keep=keep)
        assert more == 0 or step.after.table is not self.metadata.table
        if step.copies is not None:
            self.pool[step.copies[1]] = self.pool[step.copies[0]]
        numbers = np.arange(self.next, self.next + new.size)
        self.next += new.size
        written = step.slots >= 0
        assert np.array_equal(written, new.reshape(-1))
        assert len(set(step.slots[written])) == written.sum()  # no two sequences write to one place
        self.pool.reshape(-1)[step.slots[written]] = numbers[written]
        for b, (row, flags) in enumerate(zip(numbers.reshape(new.shape), new, strict=True)):
            self.tokens[b] += row[flags].tolist()
            self.columns[b] += flags.tolist()
        self.check_queries(step, new, seen)
        self.metadata = step.after
        if step.shrink is not None:
            self.move(*step.shrink)

    def check_queries(self, step, new, seen):
        """Each query of a token sees what the lists say."""
        chosen = np.arange(new.size) if step.queries is None else step.queries
        answered = set()
        for b in range(len(new)):
            rows = range(step.starts[b], step.starts[b + 1])
            held = step.table[b].astype(np.int64)[:, None] * self.metadata.block_size
            slots = (held + np.arange(self.metadata.block_size)).reshape(-1)
            for i, row in enumerate(rows):
                query = int(chosen[row])
                if step.ranges is not None:
                    low, high = step.ranges[row]
                else:
                    high = step.lengths[b] - len(rows) + i + 1
                    low = max(0, high - seen.window) if seen.window else 0
                assert query // new.shape[1] == b
                if not new.reshape(-1)[query]:
                    continue
                answered.add(query)
                column = query % new.shape[1]
                count = len(self.tokens[b]) - int(new[b, column + 1 :].sum())
                first = 0
                if seen.window:
                    first = max(0, count - seen.window)
                if seen.chunk:
                    first = (count - 1) // seen.chunk * seen.chunk
                assert (
                    self.pool.reshape(-1)[slots[low:high]].tolist() == self.tokens[b][first:count]
                )
        assert answered == set(np.flatnonzero(new))

    def crop(self, n, kept):
        self.metadata, shrink = self.metadata.cropped(n, kept=kept)
        if shrink is not None:
            self.move(*shrink)
        for b, flags in enumerate(self.columns):
            gone = sum(flags[len(flags) - n :])
            self.tokens[b] = self.tokens[b][: len(self.tokens[b]) - gone]
            self.columns[b] = flags[: len(flags) - n]

    def select(self, rows):
        self.metadata = self.metadata.selected(tuple(rows))
        self.tokens = [list(self.tokens[b]) for b in rows]
        self.columns = [list(self.columns[b]) for b in rows]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("seen", [Seen(), Seen(window=6), Seen(chunk=5)], ids=str)
def test_random_programs(seed, seen):
    """Passes of one or many columns with padding anywhere, beams, crops."""
    rng = np.random.default_rng(seed)
    reach = max(seen.window, seen.chunk) - 1
    model = Model(batch=int(rng.integers(1, 4)), block_size=4, reach=reach)
    past = 0
    keep = seed % 2 == 1
    for _ in range(60):
        batch = model.metadata.batch
        what = rng.integers(0, 6)
        if what < 4:
            columns = int(rng.choice([1, 1, 1, 2, 7, 30]))
            new = rng.random((batch, columns)) < rng.choice([0.5, 1.0, 1.0])
            model.advance(new, seen, keep)
            past = past + columns if keep or reach < 0 else 0
        elif what == 4:
            model.select(rng.integers(0, batch, int(rng.integers(1, 5))))
        elif past:
            model.crop(int(rng.integers(0, past + 1)), keep)
            past = 0
        if reach >= 0 and not keep:  # memory is bounded by the window
            used = model.metadata.used
            assert used <= model.metadata.batch * 3
            assert model.metadata.num_blocks <= 2 * max(1, 4 * 4)


def test_sequences_that_part_share_blocks_and_copy_one():
    model = Model(batch=1, block_size=4, reach=-1)
    model.advance(np.ones((1, 10), bool), Seen(), keep=False)
    model.select([0, 0, 0])
    assert model.metadata.used == 3
    model.advance(np.ones((3, 1), bool), Seen(), keep=False)
    assert model.metadata.used == 5  # two full ones, and a last one each
    step = model.metadata.advance(np.ones((3, 12), bool), 1, Seen())
    assert step.copies is None


def test_a_single_query_of_a_batch_takes_no_ranges():
    metadata = BatchMetadata.empty(2, 4, 4, -1).advance(None, 6, Seen()).after
    step = metadata.advance(None, 1, Seen())
    assert step.ranges is None
    assert step.queries is None
    assert step.lengths.tolist() == [7, 7]


def test_the_last_columns_alone():
    new = np.array([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]], bool)
    step = BatchMetadata.empty(2, 4, 4, -1).advance(new, 5, Seen())
    part = step.of_last(1)
    assert part.queries is None
    assert part.lengths.tolist() == [3, 5]
    assert part.starts.tolist() == [0, 1, 2]


def test_masks_that_do_not_fit():
    metadata = (
        BatchMetadata.empty(2, 4, 4, -1).advance(np.array([[0, 1], [1, 1]], bool), 2, Seen()).after
    )
    with pytest.raises(DimensionMismatch, match="`attention_mask`"):
        metadata.advance(np.ones((2, 2), bool), 1, Seen())
    with pytest.raises(DimensionMismatch, match="`attention_mask`"):
        metadata.advance(np.ones((3, 3), bool), 1, Seen())
    with pytest.raises(NotSupported, match="same zeros"):
        metadata.advance(np.ones((2, 3), bool), 1, Seen())
    with pytest.raises(NotSupported, match="got None"):
        metadata.advance(None, 1, Seen())
    assert metadata.columns == 2


def test_tokens_that_are_gone():
    metadata = BatchMetadata.empty(1, 4, 5, 5)
    after = metadata.advance(None, 20, Seen(window=6)).after
    with pytest.raises(NotSupported, match="dropped"):
        after.advance(None, 1, Seen())
    with pytest.raises(RuntimeError, match="activate_past_recording"):
        after.cropped(1, kept=False)
    with pytest.raises(RuntimeError, match="evicted"):
        after.cropped(9, kept=True)
    with pytest.raises(DimensionMismatch, match="at most 20"):
        after.cropped(21, kept=True)
    kept = metadata.advance(None, 20, Seen(window=6), keep=True).after
    assert kept.cropped(9, kept=True)[0].lengths.tolist() == [11]
