"""Threads and one `PagedKVCache`: one writer at a time, steps side by side, readers that see whole tokens."""

import sys
import threading

import numpy as np
import pytest
from paged_caches import grow, make, outputs, queries, refused, rows, started, state_of, write
from processes import PATIENCE
from several_threads import in_threads

import numkv

pytestmark = pytest.mark.kernels

TEXT = list(range(9))
BUSY = "being changed by another call"


@pytest.fixture
def to():
    return np.asarray


def persistent(call, *args, **options):
    """A call that is made again until nobody else is changing the cache."""
    while True:
        try:
            return call(*args, **options)
        except numkv.NumkvError as error:
            if BUSY not in str(error):
                raise


# -- a second writer


def changes(cache, seq):
    swapped = cache.swap_out(seq)
    return {
        "add": lambda: cache.add(TEXT),
        "fork": lambda: cache.fork(seq),
        "remove": lambda: cache.remove(seq),
        "truncate": lambda: cache.truncate(seq, 1),
        "compact": lambda: cache.compact(seq, [0]),
        "pin": lambda: cache.pin(seq),
        "unpin": lambda: cache.unpin(seq),
        "reserve": lambda: cache.reserve([seq], 1),
        "swap_in": lambda: cache.swap_in(swapped),
        "set_scales": lambda: cache.set_scales(0, 1.0),
        "clear": cache.clear,
        "copy": cache.copy,
    }


CHANGES = ["add", "fork", "remove", "truncate", "compact", "pin", "unpin", "reserve", "swap_in", "set_scales",
           "clear", "copy"]  # fmt: skip


@pytest.mark.parametrize("name", CHANGES)
def test_a_second_writer_changes_nothing(to, name):
    """One from inside the first: out of an iterable that the first one consumes."""
    cache = make()
    seq = started(cache, to, TEXT)
    call, tried = changes(cache, seq)[name], []

    def numbers():
        with pytest.raises(numkv.NumkvError, match=f"{name}: .*{BUSY}"):
            call()
        tried.append(True)
        yield seq

    before = state_of(cache)
    with pytest.raises(numkv.CacheFull):
        cache.reserve(numbers(), 10**6)
    assert tried
    assert state_of(cache) == before
    cache.check()


def test_a_second_writer_of_another_thread(to, monkeypatch):
    cache = make()
    seq = started(cache, to, TEXT)
    want = outputs(cache, to, np.asarray, [seq])  # compiled before
    inside, done = threading.Event(), threading.Event()
    allocate = cache.blocks.allocate

    def slow(n):
        inside.set()
        assert done.wait(PATIENCE)
        return allocate(n)

    monkeypatch.setattr(cache.blocks, "allocate", slow)

    def second():
        assert inside.wait(PATIENCE)
        try:
            for call in (cache.add, lambda: cache.remove(seq), cache.check):
                with pytest.raises(numkv.NumkvError, match=BUSY):
                    call()
            # A reader notices nothing.
            assert np.array_equal(outputs(cache, to, np.asarray, [seq]), want)
            assert cache.stats().num_tokens == len(TEXT)
        finally:
            done.set()

    in_threads(lambda: cache.rollback(cache.reserve([seq], 3)), second)
    cache.check()


def test_threads_that_change_one_cache(to):
    """Whatever they do to one another's sequences, the books stay sound and each sequence keeps its rows."""
    cache = make(num_blocks=200)
    kept = [[] for _ in range(4)]

    def work(number):
        rng = np.random.default_rng(number)
        for i in range(16):
            text = [number, *rng.integers(0, 3, rng.integers(1, 9)).tolist()]
            seq = persistent(cache.add, text)
            begin = cache.length(seq)
            step = persistent(cache.reserve, [seq], len(text) - begin)
            write(step, to, [text], [begin])
            persistent(cache.commit, step, token_ids=text[begin:])
            if i % 3 == 0:
                seq = persistent(cache.fork, seq)
            if i % 5 == 0:
                persistent(cache.truncate, seq, 1)
                persistent(cache.compact, seq, [0])
                text = text[:1]
            kept[number].append((seq, text))
            if len(kept[number]) > 6:
                persistent(cache.remove, kept[number].pop(0)[0])
            persistent(cache.check)

    in_threads(*(lambda n=n: work(n) for n in range(4)))
    cache.check()
    alone = make(num_blocks=200)
    for seq, text in kept[0] + kept[3]:
        want = outputs(alone, to, np.asarray, [started(alone, to, text)])
        assert np.array_equal(outputs(cache, to, np.asarray, [seq]), want)


# -- steps


def test_two_steps_side_by_side(to):
    """Two threads, each with a step of its own, write and attend as if they were alone."""
    cache, alone = make(num_blocks=64), make(num_blocks=64)
    texts = [[n, *TEXT, *TEXT] for n in range(2)]
    seqs = [cache.add(), cache.add()]
    got = [[], []]

    def work(number):
        text, seq = texts[number], seqs[number]
        for n in range(0, len(text), 2):
            step = persistent(cache.reserve, [seq], len(text[n : n + 2]))
            write(step, to, [text[: n + 2]], [n])
            got[number].append(step.attention(1, queries(step.num_tokens)))
            persistent(cache.commit, step)

    in_threads(lambda: work(0), lambda: work(1))
    cache.check()
    for text, outs in zip(texts, got, strict=True):
        seq = alone.add()
        for n, out in zip(range(0, len(text), 2), outs, strict=True):
            step = alone.reserve([seq], len(text[n : n + 2]))
            write(step, to, [text[: n + 2]], [n])
            assert np.array_equal(step.attention(1, queries(step.num_tokens)), out)
            alone.commit(step)


class Nosy:
    """Rows that call something when they are looked at."""

    def __init__(self, x, call):
        self.x, self.call = x, call

    @property
    def __array_interface__(self):
        self.call()
        return self.x.__array_interface__


def test_a_step_serves_one_thread_at_a_time(to):
    cache = make()
    seq = cache.add()
    step = cache.reserve([seq], 1)
    k, v = rows(0, [1])
    calls = (
        lambda: step.append(1, k, v),
        lambda: step.attention(0, queries(1)),
        lambda: step.attention_weights(0, queries(1)),
        lambda: step.write(0, np.zeros((1, 64), np.float32), num_q_heads=4, qk_mode=0),
        lambda: step.mark_written(1),
        lambda: cache.commit(step),
        lambda: cache.rollback(step),
    )

    def all_refused():
        for call in calls:
            with pytest.raises(numkv.NumkvError, match=f"this Step is {BUSY}"):
                call()

    step.append(0, Nosy(k, all_refused), v)
    assert step.unwritten_layers == [1]
    step.append(1, k, v)
    cache.commit(step)
    assert cache.length(seq) == 1


# -- readers


def test_readers_beside_a_writer_see_whole_tokens(to):
    """Beside a sequence that grows: the result for one of its lengths. Of another sequence: always the same."""
    cache, alone = make(num_blocks=64), make(num_blocks=64)
    text = list(range(40))
    q = to(queries(1))
    growing, still = cache.add(), started(cache, to, TEXT)
    grow(cache, to, growing, text[:1])
    want = {}
    seq = alone.add()
    for n in range(1, len(text) + 1):
        grow(alone, to, seq, text[:n])
        want[n] = alone.decode_attention(0, [seq], q)
    fixed = cache.decode_attention(0, [still], q)
    other = cache.fork(still)
    cache.compact(other, [1, 2, 5])  # compiled before
    cache.remove(other)
    over, seen = threading.Event(), set()

    def writer():
        try:
            for n in range(2, len(text) + 1):
                grow(cache, to, growing, text[:n])
                other = cache.fork(still)
                cache.compact(other, [1, 2, 5])
                cache.truncate(other, 1)
                cache.remove(other)
        finally:
            over.set()

    def reader():
        while not over.is_set():
            assert np.array_equal(cache.decode_attention(0, [still], q), fixed)
            before = cache.length(growing)
            out = cache.decode_attention(0, [growing], q)
            lengths = range(before, cache.length(growing) + 1)
            seen.add(next(n for n in lengths if np.array_equal(out, want[n])))
            assert cache.stats().num_seqs in (2, 3)

    in_threads(writer, reader, reader)
    assert np.array_equal(cache.decode_attention(0, [growing], q), want[len(text)])
    assert seen
    cache.check()


def windows_move(cache, seq):
    step = cache.reserve([seq], 4)
    for layer in range(2):
        step.append(layer, *np.zeros((2, 4, 2, 8), np.float32))
    cache.commit(step)


DROPS = {
    "remove": lambda cache, seq: cache.remove(seq),
    "truncate": lambda cache, seq: cache.truncate(seq, 8),
    "compact": lambda cache, seq: cache.compact(seq, [0, 4, 5, 6, 7, 8]),
    "window": windows_move,
    "clear": lambda cache, seq: cache.clear(),
}
STAYS = {
    "add": lambda cache, seq: cache.add(TEXT),
    "fork": lambda cache, seq: cache.fork(seq),
    "open step": lambda cache, seq: cache.reserve([cache.add()], 3),
    "no cut": lambda cache, seq: cache.truncate(seq, 9),
    "pin": lambda cache, seq: cache.pin(seq),
}


def readers(cache, seq, q):
    return {
        "attend": lambda: cache.decode_attention(1, [seq], q),
        "attention_mass": lambda: cache.attention_weights(1, seq, q),
        "copy_out": lambda: cache.swap_out(seq),
    }


@pytest.mark.parametrize("reader", ["attend", "attention_mass", "copy_out"])
@pytest.mark.parametrize("change", [*DROPS, *STAYS])
def test_a_reader_whose_rows_go_gets_an_error(to, monkeypatch, reader, change):
    """The change comes after the sequence was looked up and before the result; readers of others notice nothing."""
    for own in (True, False):
        cache = make(2, windows=[-1, 3], num_blocks=80)
        seq, other = started(cache, to, TEXT), started(cache, to, [50, *TEXT[1:]])
        changed = seq if own else other
        fails = change in DROPS and (own or change == "clear")
        where = f"numkv.caches.paged.cache.{reader}"
        module = sys.modules["numkv.caches.paged.cache"]
        real = getattr(module, reader)

        def overtaken(*args, real=real, cache=cache, changed=changed, **options):
            result = real(*args, **options)
            {**DROPS, **STAYS}[change](cache, changed)
            return result

        call = readers(cache, seq, to(queries(1)))[reader]
        with monkeypatch.context() as patch:
            patch.setattr(where, overtaken)
            if fails:
                with pytest.raises(numkv.NumkvError, match="moved or dropped"):
                    call()
            else:
                call()
        cache.check()
        if not fails or change in ("truncate", "compact", "window"):
            call()


def test_nobody_reads_rows_that_are_moving(to, monkeypatch):
    cache = make()
    seq, other = started(cache, to, TEXT), started(cache, to, [50, *TEXT])
    q, refusals = to(queries(1)), []
    forget = cache.blocks.forget

    def slow(ids):
        forget(ids)
        for call in readers(cache, seq, q).values():
            with pytest.raises(numkv.NumkvError, match="moved or dropped"):
                call()
            refusals.append(call)
        cache.decode_attention(0, [other], q)

    monkeypatch.setattr(cache.blocks, "forget", slow)
    cache.compact(seq, [0, 3, 8])
    assert len(refusals) == 3
    cache.check()
    cache.decode_attention(0, [seq], q)


def test_an_interrupt_while_rows_move_loses_the_sequence_and_nothing_else(to, monkeypatch):
    cache = make()
    seq, other = started(cache, to, TEXT), started(cache, to, [50, *TEXT])
    want = outputs(cache, to, np.asarray, [other])
    moves = []

    def interrupted(*args):
        moves.append(args)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(type(cache._pools[0].k_buffer), "copy_tokens", interrupted)
        with pytest.raises(KeyboardInterrupt):
            cache.compact(seq, [0, 3, 8])
    assert moves
    assert cache.sequences == (other,)
    refused(cache, IndexError, "`seq`", cache.length, seq)
    assert np.array_equal(outputs(cache, to, np.asarray, [other]), want)
    cache.check()


@pytest.mark.parametrize("change", [*DROPS, *STAYS])
def test_the_cache_counts_changes_that_drop_rows(to, change):
    """For those who read all of it at once, as a save to a file does."""
    cache = make(2, windows=[-1, 3], num_blocks=80)
    seq = started(cache, to, TEXT)
    before = cache._access.dropped
    {**DROPS, **STAYS}[change](cache, seq)
    assert (cache._access.dropped != before) == (change in DROPS)
    assert cache._access.dropped % 2 == 0
