"""Stores across a network: how much is asked, silence, refusals, failures now and then, and lookups beside steps."""

import asyncio
import gc
import os
import threading
import time

import numpy as np
import pytest
from interrupts import interrupted_in_a_condition, raising_signals
from stored_prefixes import cache, check_rows, grow, prompt, started, store_in

import numkv
from numkv.store import BlockStore, PrefixStore, StoreAnswers, StoreSilent
from numkv.store import requests as module

pytest.importorskip("fsspec")
from networks import Network

LONG = [7 * i % 1000 for i in range(513)]  # 128 blocks


@pytest.fixture
def quick(monkeypatch):
    """Ask a store that does not answer again soon."""
    monkeypatch.setattr(module, "_FIRST", 0.05)
    monkeypatch.setattr(module, "_LONGEST", 0.05)


@pytest.fixture
def made():
    """Stores over a network, closed at the end, when it answers."""
    stores, networks = [], []

    def over(network, **options):
        networks.append(network)
        options = {"timeout": 60.0, **options}  # which a loaded machine needs
        stores.append(PrefixStore("x", mark="a model", file_system=network, **options))
        return stores[-1]

    yield over
    for network in networks:
        network.refuses, network.failing = False, 0.0
        network.speak()
    for store in stores:
        store.close()


def wait_for(condition):
    """Wait until something is so; a minute at most."""
    until = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.005)


def filled(made, text=LONG, **options):
    """A network that has the blocks of a text."""
    network = Network()
    first = cache(made(network), num_blocks=160, **options)
    started(first, text)
    assert first.store.flush() == 0
    network.calls.clear()
    return network


def test_a_hit_asks_for_few_names_and_for_all_objects_at_once(made):
    network = filled(made)
    network.delay = 0.1
    of = cache(made(network), num_blocks=160)
    seq = of.add(LONG)
    assert of.cached_len(seq) == 512
    check_rows(of, seq, LONG)
    assert network.calls.count("cat") == 128
    assert network.calls.count("info") <= 10
    assert network.peak > 64  # of 128, on a machine with other things to do


def test_where_a_prefix_ends_is_found_in_few_questions(made):
    network = filled(made, LONG[:337])  # 84 blocks
    of = cache(made(network), num_blocks=160)
    seq = of.add(LONG)
    assert of.cached_len(seq) == 336
    assert network.calls.count("info") < 84
    assert network.calls.count("cat") == 84


def test_a_prompt_that_nobody_has_asks_for_less_than_its_blocks(made):
    network = filled(made)
    of = cache(made(network), num_blocks=160)
    assert of.cached_len(of.add([(3 * i + 1) % 1000 for i in range(513)])) == 0
    assert len(network.calls) <= 10


def test_holes_shorten_a_prefix(made):
    network = filled(made)
    first = cache(made(network), num_blocks=160)
    seq = first.add(LONG)
    names = first._sequences[seq].digests[0]
    part = first._store.tiers.parts[0]
    network.store.pop("/x/" + part.section.key(names[50].tobytes()))
    of = cache(made(network), num_blocks=160)
    seq = of.add(LONG)
    assert of.cached_len(seq) == 200
    check_rows(of, seq, LONG)


@pytest.mark.parametrize("how", ["silent", "refuses"])
def test_a_store_that_is_gone_is_left_alone_and_comes_back(made, quick, how, monkeypatch, caplog):
    network, told = filled(made), []
    monkeypatch.setattr(module, "_FIRST", 3600.0)  # not yet
    of = cache(made(network, timeout=0.05, on_event=told.append), num_blocks=160)
    network.be_silent() if how == "silent" else setattr(network, "refuses", True)
    seq = of.add(LONG)
    assert of.cached_len(seq) == 0
    now = of.store.stats()
    assert not now.answers
    assert sum(now.errors.values()) > 0
    assert all(asked.startswith("look: ") for asked in now.errors)
    assert now.last_error
    asked = len(network.calls)
    assert of.cached_len(of.add(prompt(1))) == 0
    assert len(network.calls) == asked  # nobody asks any more
    of.store.close(), caplog.clear()

    monkeypatch.setattr(module, "_FIRST", 0.02)
    of = cache(made(network, timeout=0.05, on_event=told.append), num_blocks=160)
    number, _ = started(of, prompt(1))
    assert of.store.flush() == 5  # none of them is in the store
    assert of.store.stats().waiting == 5
    network.refuses = False
    network.speak()
    wait_for(lambda: of.store.stats().answers)
    assert of.store.flush() == 0
    assert of.store.stats().written == 5
    check_rows(of, number, prompt(1))
    wait_for(lambda: any(isinstance(x, StoreAnswers) for x in told))
    assert any(isinstance(x, StoreSilent) and x.error for x in told)
    said = [record.message for record in caplog.records]
    assert sum("does not answer" in text for text in said) == 1
    assert sum("answers again" in text for text in said) == 1
    other = cache(made(network), num_blocks=160)
    assert other.cached_len(other.add(LONG)) == 512


def test_late_answers_are_written_nowhere(made):
    """Blocks that were to take them may be others' by then."""
    network = filled(made)
    of = cache(made(network, timeout=0.05), num_blocks=160)
    network._call = answered_names_alone(network)
    seq = of.add(LONG)
    assert of.cached_len(seq) == 0
    grow(of, seq, LONG)
    network.speak()
    wait_for(lambda: network.now == 0)
    check_rows(of, seq, LONG)


def answered_names_alone(network):
    """Answer questions for names, and none for contents until it speaks."""
    call = network._call

    def made(name, *args, **options):
        if name == "cat" and not network._speak.is_set():
            network.silent = True
            try:
                return call(name, *args, **options)
            finally:
                network.silent = False
        network.silent = False
        return call(name, *args, **options)

    return made


def test_a_slow_store_that_answers_is_read_on(made, monkeypatch):
    """All of it takes many times as long as may pass without an answer."""
    network = filled(made)
    network.delay = 0.05
    monkeypatch.setattr("numkv.store.remote._REQUESTS", 2)
    of = cache(made(network, timeout=1.5), num_blocks=160)
    seq = of.add(LONG)
    assert of.cached_len(seq) == 512
    assert of.store.stats().errors == {}


def test_failures_now_and_then(made, quick):
    network = Network()
    network.failing = 0.15
    texts = [prompt(number, 41) for number in range(25)]
    for _ in range(3):
        of = cache(made(network, host_nbytes=1 << 24), num_blocks=400)
        for text in texts:
            seq = of.add(text)
            grow(of, seq, text)
            check_rows(of, seq, text)
        for _ in range(100):
            if of.store.flush() == 0:
                break
            time.sleep(0.02)
    assert sum(of.store.stats().errors.values()) > 0
    network.failing = 0.0
    wait_for(lambda: of.store.stats().answers)
    last = cache(made(network), num_blocks=400)
    found = [last.cached_len(last.add(text)) for text in texts]
    assert np.mean(found) > 30


@pytest.mark.parametrize("name", ["add", "lookup", "flush", "stats", "close", "put", "get"])
def test_interrupts_leave_no_lock_taken(made, name):
    """An error in the middle of a condition's own code would: threads of the store then waited for ever."""
    text = LONG[:33]
    network = filled(made, text)
    with raising_signals():
        for at in range(1, 1000):
            of = cache(made(network), num_blocks=40)
            other = BlockStore("y", mark="m", file_system=network, timeout=60.0)
            calls = {
                "add": lambda of=of: of.add(text),
                "lookup": lambda of=of: of.lookup(text),
                "put": lambda other=other: other.put(["a"], [b"b"]),
                "get": lambda other=other: other.get(["a"]),
                **{x: getattr(of.store, x) for x in ("flush", "stats", "close")},
            }
            is_last = not interrupted_in_a_condition(calls[name], at)

            def then(of=of, other=other):
                of.add(text)
                of.store.close()
                other.put(["b"], [b"c"])

            after = threading.Thread(target=then, daemon=True)
            after.start()
            after.join(30)
            assert not after.is_alive(), f"{name}: interrupt {at} has left a lock taken"
            if is_last:
                break


def test_many_are_written_at_once(made):
    network = Network(0.05)
    of = cache(made(network), num_blocks=160)
    started(of, LONG)
    assert of.store.flush() == 0
    assert network.calls.count("pipe") == 128
    assert network.calls.count("info") <= 10  # of `add`
    assert 16 < network.peak <= 128


# ---------------------------------------------------------------- lookups


def test_a_lookup_brings_a_prefix_beside_steps(made):
    network = filled(made)
    network.delay = 0.02
    of = cache(made(network), num_blocks=400)
    other = of.add(prompt(1, 41))
    found = of.lookup(LONG)
    grow(of, other, prompt(1, 41))
    step = of.reserve([other], 1)  # open while the store is asked
    assert found.future.result(60) == 512
    assert found.ready
    assert repr(found) == "<PrefixLookup: 512 tokens>"
    of.rollback(step)
    network.calls.clear()
    seq = of.add(LONG, lookup=found)
    assert network.calls == []
    assert of.cached_len(seq) == 512
    check_rows(of, seq, LONG)
    assert of.store.stats().found_in_store == 128
    assert of.store.stats().host_nbytes > 0
    found.close()
    assert of.store.stats().host_nbytes == 0


def test_add_takes_over_what_a_lookup_has_brought_so_far(made):
    network = filled(made)
    of = cache(made(network, timeout=None), num_blocks=400)
    network.be_silent()
    found = of.lookup(LONG)
    assert repr(found) == "<PrefixLookup: under way>"
    seq = of.add(LONG, lookup=found)  # waits for nothing
    assert of.cached_len(seq) == 0
    network.speak()
    assert found.future.result(60) == 512
    assert of.cached_len(of.add(LONG, lookup=found)) == 512


def test_a_lookup_brings_what_the_pool_lacks(made):
    network = filled(made)
    of = cache(made(network), num_blocks=400)
    of.add(LONG[:200])
    network.calls.clear()
    assert of.lookup(LONG).future.result(60) == 512
    assert network.calls.count("cat") == 128 - 49


def test_a_lookup_keeps_within_the_host_tier(made):
    network = filled(made)
    of = cache(made(network, host_nbytes=150 * 512), num_blocks=400)
    size = of._store.tiers.parts[0].content.content
    first, second = of.lookup(LONG), of.lookup(LONG)
    found = sorted([first.future.result(60), second.future.result(60)])
    assert size == 512 * 2
    assert found[0] == 0  # there was no room for a second one
    assert of.store.stats().host_nbytes <= 150 * 512
    del first, second
    gc.collect()
    assert of.store.stats().host_nbytes == 0


def test_a_lookup_can_be_awaited(made):
    network = filled(made)
    of = cache(made(network), num_blocks=400)

    async def wait():
        return await asyncio.wrap_future(of.lookup(LONG).future)

    assert asyncio.run(wait()) == 512


def test_lookups_of_layers_that_are_not_alike(tmp_path):
    """Windows read what the newest token sees; states are there where a prefix ends."""
    options = {
        "layers": 2,
        "windows": [-1, 8],
        "states": {1: [((3,), "float32")]},
        "state_slots": numkv.StateSlots(16),
    }
    text = prompt(3, 41)

    def over():
        return cache(store_in(tmp_path), **options)

    def grown(of, seq):
        begin = of.length(seq)
        step = of.reserve([seq], len(text) - begin)
        for layer in range(2):
            step.append(layer, *np.ones((2, step.num_tokens, 2, 8), np.float32))
        step.write_state(1, np.full((1, 3), len(text), np.float32))
        of.commit(step, token_ids=text[begin:])

    first = over()
    grown(first, first.add(text))
    assert first.store.flush() == 0
    plain, looked = over(), over()
    want = plain.cached_len(plain.add(text))
    found = looked.lookup(text)
    assert found.future.result(60) == want
    assert looked.cached_len(looked.add(text, lookup=found)) == want


def test_a_lookup_that_fails_says_so(tmp_path, monkeypatch):
    of = cache(store_in(tmp_path))

    def fail(*args):
        raise MemoryError

    monkeypatch.setattr(of._store.tiers, "look_up", fail)
    found = of.lookup(LONG)
    assert isinstance(found.future.exception(60), MemoryError)
    assert repr(found) == "<PrefixLookup: failed with MemoryError>"
    assert of.cached_len(of.add(LONG, lookup=found)) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("is_done", [False, True])
def test_a_lookup_in_a_forked_child_owes_nothing_and_ends(made, is_done):
    """The child's host tier begins empty, and the thread that reads is the parent's."""
    network = filled(made)
    of = cache(made(network, timeout=None), num_blocks=400)
    cat, begun = network.cat_file, threading.Event()

    def slow(*args, **options):
        begun.set()
        network._speak.wait(60)
        return cat(*args, **options)

    if is_done:
        network.speak()
    network.cat_file = slow
    found = of.lookup(LONG)
    assert begun.wait(60)
    if is_done:
        assert found.future.result(60) == 512
    lent = of.store.stats().host_nbytes
    assert lent > 0
    child = os.fork()
    if not child:
        status = 1
        try:
            assert found.future.result(60) == 512 * is_done
            assert found.ready
            assert of.cached_len(of.add(LONG, lookup=found)) == 512 * is_done
            before = of.store.stats().host_nbytes
            found.close()
            assert of.store.stats().host_nbytes == before == 0
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert of.store.stats().host_nbytes == lent
    network.speak()
    assert found.future.result(60) == 512
    found.close()
    assert of.store.stats().host_nbytes == 0


def test_lookups_that_are_refused(tmp_path):
    with pytest.raises(numkv.NotSupported, match="lookup: expected a cache with a store"):
        cache(None).lookup(LONG)
    of = cache(store_in(tmp_path))
    with pytest.raises(TypeError, match="`lookup`: expected what PagedKVCache"):
        of.add(LONG, lookup=3)
    with pytest.raises(TypeError, match="lookup"):
        of.lookup()
    of.store.close()
    assert of.lookup(LONG).future.result(60) == 0


# ---------------------------------------------------------------- clocks and truth


@pytest.mark.parametrize("days", [-1, 1])
def test_clocks_of_other_machines_do_not_matter(tmp_path, monkeypatch, days):
    """One process uses a prompt again and again, the other one writes more and more; one clock is a day off."""
    real = time.time
    size = 0

    def over(**options):
        return cache(store_in(tmp_path, **options), num_blocks=400)

    first = over()
    started(first, prompt(0, 41))
    first.store.flush()
    size = sum(p.stat().st_size for p in tmp_path.rglob("*") if p.is_file())
    found = []
    for number in range(1, 9):
        time.sleep(0.12)  # the end of a prefix counts as used a tenth of a second earlier
        monkeypatch.setattr(time, "time", lambda: real() + days * 86400)
        writer = over(max_nbytes=4 * size)
        started(writer, prompt(number, 41))
        writer.store.flush()
        monkeypatch.setattr(time, "time", real)
        reader = over(max_nbytes=4 * size)
        found.append(reader.cached_len(reader.add(prompt(0, 41))))
        reader.store.flush()
    assert found == [40] * len(found)
    last = over()
    assert last.cached_len(last.add(prompt(8, 41))) == 40


def test_flush_says_what_is_in_the_store(tmp_path):
    """After a power cut there may be zeros, of the right length."""
    first = cache(store_in(tmp_path))
    started(first, prompt(1))
    assert first.store.flush() == 0
    for path in tmp_path.rglob("*"):
        if path.is_file():
            path.write_bytes(bytes(path.stat().st_size))
    second = cache(store_in(tmp_path))
    seq = second.add()  # nothing is looked for
    grow(second, seq, prompt(1))
    assert second.store.flush() == 0
    assert (second.store.stats().written, second.store.stats().already_there) == (5, 0)
    third = cache(store_in(tmp_path))
    assert third.cached_len(third.add(prompt(1))) == 20


# ---------------------------------------------------------------- copies at hand


def copies_of(folder):
    return [
        p
        for p in folder.rglob("*")
        if p.is_file() and p.suffix != ".partial" and p.name != ".evicting"
    ]


def test_a_network_is_asked_once_for_a_block(made, tmp_path):
    network = filled(made)
    first = cache(made(network, local=tmp_path), num_blocks=160)
    assert first.cached_len(first.add(LONG)) == 512
    wait_for(lambda: len(copies_of(tmp_path)) == 128)
    network.calls.clear()
    second = cache(made(network, local=tmp_path), num_blocks=160)
    seq = second.add(LONG)
    assert second.cached_len(seq) == 512
    check_rows(second, seq, LONG)
    assert network.calls == []


def test_copies_are_found_while_the_network_is_silent(made, tmp_path):
    network = Network()
    first = cache(made(network, local=tmp_path), num_blocks=160)
    started(first, LONG)
    assert first.store.flush() == 0
    wait_for(lambda: len(copies_of(tmp_path)) == 128)
    network.be_silent()
    second = cache(made(network, local=tmp_path, timeout=0.05), num_blocks=160)
    assert second.cached_len(second.add(prompt(1, 41))) == 0  # nobody answers
    seq = second.add(LONG)
    assert second.cached_len(seq) == 512
    check_rows(second, seq, LONG)


def test_a_damaged_copy_is_read_anew(made, tmp_path):
    network = filled(made)
    first = cache(made(network, local=tmp_path), num_blocks=160)
    first.add(LONG)
    wait_for(lambda: len(copies_of(tmp_path)) == 128)
    for path in copies_of(tmp_path)[::9]:
        path.write_bytes(bytes(path.stat().st_size))
    second = cache(made(network, local=tmp_path), num_blocks=160)
    seq = second.add(LONG)
    assert second.cached_len(seq) == 512
    check_rows(second, seq, LONG)
    assert second.store.stats().damaged == 0  # what processes share is whole


def test_copies_keep_within_their_bound(made, tmp_path):
    network = filled(made)
    size = len(next(iter(network.store.values())).getvalue())
    of = cache(made(network, local=tmp_path, local_nbytes=20 * size), num_blocks=160)
    assert of.cached_len(of.add(LONG)) == 512
    place = of.store._engine.place
    wait_for(lambda: not place._waiting)
    assert 10 <= len(copies_of(tmp_path)) <= 22
    assert of.cached_len(of.add([*LONG, 1])) == 512


def test_places_of_copies_that_are_refused(tmp_path):
    with pytest.raises(ValueError, match="`local_nbytes`: expected None without `local`"):
        store_in(tmp_path, local_nbytes=10)
    with pytest.raises(ValueError, match="`local`: expected another folder than `place`"):
        store_in(tmp_path, local=tmp_path)
    with pytest.raises(TypeError, match="`local`: expected a path"):
        store_in(tmp_path, local=3)
