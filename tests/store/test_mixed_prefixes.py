"""Prefixes of caches whose layers are not alike, and of states, in pool, host memory and folder."""

import os
import pickle
import threading

import mixed_caches
import numpy as np
import pytest
from mixed_caches import Layer
from processes import PATIENCE
from stored_mixed import LAYERS, SIZE, cache, check_rows, grow, prompt, started, store_in

import numkv
from numkv.store import BlocksDropped, PrefixFound
from numkv.store.folder import Folder

#: A prompt of five full blocks; steps end after 2, 4 and 5 of them and at its end.
TEXT = prompt(1, 21)
GROUPS = 4


def objects(folder):
    return sorted(p for p in folder.rglob("*") if p.is_file() and p.name != ".evicting")


def written(folder, text=TEXT, **options):
    """A cache that has written a prompt."""
    of = cache(store_in(folder), **options)
    assert started(of, text)[1] == 0
    assert of.store.flush() == 0
    return of


def test_a_second_cache_finds_blocks_and_states(target, tmp_path):
    first = written(tmp_path, target=target)
    assert first.num_groups == GROUPS
    # A block of each group, and the states after 2 and 4 blocks.
    assert first.store.stats().written == len(objects(tmp_path)) == 5 * GROUPS + 2
    told = []
    second = cache(store_in(tmp_path, on_event=told.append), target=target)
    seq = second.add(TEXT)
    assert second.cached_len(seq) == 16  # where the last step ended that wrote a checkpoint
    check_rows(second, seq, TEXT)
    grow(second, seq, TEXT)
    check_rows(second, seq, TEXT)
    found = next(x for x in told if isinstance(x, PrefixFound))
    assert (found.wanted, found.in_store, found.missed) == (5, 4, 1)
    now = second.store.stats()
    assert now.bytes_read < sum(path.stat().st_size for path in objects(tmp_path))
    # Two full groups, a block of the window and two of the chunk; and one checkpoint.
    parts = second._store.tiers.parts
    sizes = [part.section.layout.nbytes for part in parts]
    counts = [_read_of(second, number) for number in range(GROUPS)]
    of_states = second._store.tiers.of_states.section.layout.nbytes
    assert sorted(counts) == [1, 2, 4, 4]
    assert now.bytes_read == np.dot(sizes, counts) + of_states


def _read_of(of, group):
    """Blocks of a group that a prefix of four blocks needs."""
    return 4 - of._store.first_needed(group, 16)


def test_without_states_a_prefix_goes_to_the_last_full_block(tmp_path):
    written(tmp_path, states=None)
    second = cache(store_in(tmp_path), states=None)
    seq, found = started(second, TEXT)
    assert found == 20
    check_rows(second, seq, TEXT)
    assert second.store.flush() == 0
    assert second.store.stats().written == 0


def test_alike_layers_that_share_chunk_and_keep_states(tmp_path):
    """Their blocks have one form, as they share buffers."""
    layers = [Layer(2, 8, 8), Layer(2, 8, 8, chunk=8), Layer(2, 8, 8, source=0), *LAYERS[:1] * 2]
    layers[4] = Layer(2, 8, 8, chunk=8)
    layers = [*layers, Layer(2, 8, 8, source=1)._replace(chunk=8)]
    written_by = cache(store_in(tmp_path), layers=layers)
    started(written_by, TEXT, layers)
    assert written_by.store.flush() == 0
    of = cache(store_in(tmp_path), layers=layers)
    assert len(of._store.tiers.parts) == 1
    seq, found = started(of, TEXT, layers)
    assert found == 16
    check_rows(of, seq, TEXT, layers)


def test_what_pools_and_slots_lose_comes_back_from_the_host(target, tmp_path):
    of = cache(store_in(tmp_path), num_blocks=24, num_states=4, target=target)
    for number in range(4):
        seq, _ = started(of, prompt(number))
        of.remove(seq)
    seq, found = started(of, prompt(0))
    assert found == 16
    check_rows(of, seq, prompt(0))
    assert of.store.stats().found_in_host == 4
    assert of.store.flush() == 0


def test_a_prefix_ends_where_there_are_states(tmp_path):
    """Checkpoints that are gone or damaged shorten it, and no slot is left behind."""
    first = written(tmp_path)
    part = first._store.tiers.of_states
    names = [part._masked(first._sequences[0].digests[0][i]).tobytes() for i in (1, 3)]
    paths = [tmp_path / part.section.key(name) for name in names]
    whole = paths[1].read_bytes()
    paths[1].write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    told = []
    second = cache(store_in(tmp_path, on_event=told.append))
    seq = second.add(TEXT)
    assert second.cached_len(seq) == 8
    check_rows(second, seq, TEXT)
    assert second.store.stats().damaged == 1
    second.store.flush()
    assert [x.reason for x in told if isinstance(x, BlocksDropped)] == ["damaged"]
    assert second.states.stats().used == 1
    assert not paths[1].exists()
    started(second, TEXT)
    second.store.flush()
    assert paths[1].read_bytes() == whole
    for path in paths:
        path.unlink()
    third = cache(store_in(tmp_path))
    assert started(third, TEXT)[1] == 0
    assert third.store.stats().damaged == 0


def test_few_slots(tmp_path):
    """States need a free slot; the pool's own checkpoint is not given up for a longer prefix."""
    written(tmp_path)
    of = cache(store_in(tmp_path), num_states=2)
    grow(of, of.add(), TEXT[:8])
    of.remove(0)
    seq = of.add(TEXT)  # one slot holds the checkpoint after 8 tokens
    assert of.cached_len(seq) == 16
    assert of.add(TEXT) > seq  # none is free now but that one
    of.remove(seq + 1)
    check_rows(of, seq, TEXT)
    step = of.reserve([seq], 1)
    assert of.states.num_free == 0
    other = of.add(prompt(2))
    assert of.cached_len(other) == 0
    of.rollback(step)
    check_rows(of, seq, TEXT)


OTHERS = {
    "heads": [Layer(1, 8, 8), *LAYERS[1:]],
    "width": [*LAYERS[:4], Layer(1, 16, 16)],
    "kind": [*LAYERS[:4], Layer(1, 16, 8, "fp16")],
    "window": [LAYERS[0], Layer(1, 16, 16, window=4), *LAYERS[2:]],
    "chunk": [*LAYERS[:2], Layer(2, 8, 8, "int8", chunk=12), *LAYERS[3:]],
    "source": [*LAYERS[:3], Layer(2, 8, 8), LAYERS[4]],
}


@pytest.mark.parametrize("name", [*OTHERS, "states", "shape of states", "no states"])
def test_what_layers_are_belongs_to_the_identity(tmp_path, name):
    options = {"layers": OTHERS.get(name, LAYERS)}
    if name == "states":
        options["states"] = {1: [((3,), "int32"), ((2, 2), "int32")], 4: [((5,), "uint8")]}
    elif name == "shape of states":
        options["states"] = {1: [((3,), "int32"), ((4,), "float32")], 4: [((5,), "uint8")]}
    elif name == "no states":
        options["states"] = None
    first, other = cache(store_in(tmp_path)), cache(store_in(tmp_path), **options)
    theirs = {part.section.folder for part in other._store.tiers.parts}
    assert len(theirs) == 1
    assert theirs != {part.section.folder for part in first._store.tiers.parts}
    same = cache(store_in(tmp_path), num_blocks=33, num_states=9, every=8)
    assert same._store.tiers.parts[0].section.folder == first._store.tiers.parts[0].section.folder


def test_checkpoints_that_nobody_can_name_are_not_kept(tmp_path):
    """And those of a copy are."""
    of = cache(store_in(tmp_path), num_states=3)
    seq = of.add()
    for _ in range(4):  # token ids are not said
        step = of.reserve([seq], 4)
        step.mark_written()
        of.commit(step)
    of.remove(seq)
    assert of.store.flush() == 0
    assert of.store.stats().host_blocks == len(objects(tmp_path)) == 0
    started(of, TEXT)
    of.store.flush()
    for path in objects(tmp_path):
        path.unlink()
    twin = of.copy()
    assert pickle.loads(pickle.dumps(of)).store is None
    of.remove(1), twin.remove(1)
    for each in (twin, of):
        other, _ = started(each, prompt(6, 30))
        each.remove(other)
        seq, found = started(each, TEXT)
        assert found == 16
        check_rows(each, seq, TEXT)
        each.remove(seq)
    assert of.store.stats().found_in_host > 0


def test_clearing_and_forgetting_leave_what_waits(tmp_path, monkeypatch):
    go, write = threading.Event(), Folder.write
    monkeypatch.setattr(Folder, "write", lambda *args: (go.wait(PATIENCE), write(*args))[1])
    of = cache(store_in(tmp_path))
    started(of, TEXT)
    of.clear()
    other, _ = started(of, prompt(3))
    go.set()
    assert of.store.flush() == 0
    second = cache(store_in(tmp_path))
    for text in (TEXT, prompt(3)):
        seq, found = started(second, text)
        assert found == 16
        check_rows(second, seq, text)


def test_objects_are_where_the_page_says(tmp_path):
    """One folder, and sizes that differ from group to group."""
    first = written(tmp_path)
    (folder,) = [p for p in tmp_path.iterdir() if p.is_dir()]
    sizes = {part.section.layout.content for part in first._store.tiers.parts}
    assert sizes == {2 * 2 * 8 * SIZE * 4, 2 * 16 * SIZE * 4, 24 * SIZE * 4, 2 * 2 * 12 * SIZE}
    assert first._store.tiers.of_states.content.content == 3 * 4 + 4 * 4 + 5
    assert os.listdir(tmp_path) == [folder.name]


def test_scales_of_heads_belong_to_the_identity(tmp_path):
    layers = [Layer(2, 8, 8, "fp8_e4m3"), Layer(1, 16, 16)]
    first, second = (cache(store_in(tmp_path), layers=layers, states=None) for _ in "ab")
    first.set_scales(0, k=2.0)
    step = first.reserve([first.add(TEXT)], 21)
    for number, layer in enumerate(layers):
        step.append(number, *[np.ones((21, layer.heads, layer.dim), np.float32)] * 2)
    first.commit(step, token_ids=TEXT)
    first.store.flush()
    assert second.cached_len(second.add(TEXT)) == 0
    second.clear()
    second.set_scales(0, k=2.0)
    assert second.cached_len(second.add(TEXT)) == 20


def test_what_compaction_moves_is_not_written(tmp_path):
    of = cache(store_in(tmp_path), states=None)
    seq, _ = started(of, TEXT)
    of.compact(seq, [0, 4, 5, *range(13, 21)])
    assert of.store.flush() == 0
    reader = cache(store_in(tmp_path), states=None)
    other, found = started(reader, TEXT)
    assert found == 20
    check_rows(reader, other, TEXT)


def test_a_copy_still_finds_prefixes_to_the_token(tmp_path):
    of = cache(store_in(tmp_path), states=None)
    started(of, TEXT)
    for each in (of, of.copy()):
        seq = each.add([*TEXT[:14], 999, 999])
        assert each.cached_len(seq) == 14
        check_rows(each, seq, TEXT)


def test_new_scales_forget_states_too(tmp_path):
    layers = [Layer(2, 8, 8, "fp8_e4m3"), Layer(1, 16, 16)]
    of = mixed_caches.make(
        layers, num_blocks=8, state_slots=numkv.StateSlots(4), states={0: [((1,), "int8")]},
        store=store_in(tmp_path),
    )  # fmt: skip
    step = of.reserve([of.add(TEXT[:5])], 4)
    step.mark_written()
    of.commit(step, token_ids=TEXT[:4])
    of.remove(0)
    assert of.store.flush() == 0
    assert of.states.stats().cached == 1
    of.set_scales(0, k=2.0)
    assert of.states.stats().cached == 0
    assert of.cached_len(of.add(TEXT[:5])) == 0
