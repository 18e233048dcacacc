"""A `NumkvCache` within a number of bytes: what it gives, what it refuses, and that nothing is lost then."""

import contextlib
import copy
import gc
import pickle
import threading
import weakref

import numpy as np
import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers", minversion="5.19")

from decoder_models import make, prompts  # noqa: E402

import numkv  # noqa: E402
from numkv.transformers import ContinuousBatch, NumkvCache, restore, use  # noqa: E402

# A block of K and V of the tiny Llama in fp32: four layers, two heads of 16, 256 tokens.
BLOCK = 4 * 2 * 2 * 16 * 256 * 4
FULL = numkv.FullPrecision


def on_numkv(family, **changes):
    model = make(family, max_position_embeddings=4096, **changes)
    model.set_attn_implementation("numkv")
    return model


@pytest.fixture(scope="module")
def llama():
    return on_numkv("llama")


class Text:
    """A batch of texts over a cache: what it has seen, and passes that go on with it."""

    def __init__(self, model, cache, batch=1):
        self.model, self.cache = model, cache
        self.mask = torch.zeros(batch, 0, dtype=torch.long)

    def add(self, ids, mask=None):
        new = torch.ones_like(ids) if mask is None else mask
        whole = torch.cat([self.mask, new], 1)
        with torch.no_grad():
            found = self.model(ids, attention_mask=whole, past_key_values=self.cache).logits
        self.mask = whole
        return found[new.bool()]


def seen(cache):
    """The tokens of each layer, and where their rows lie in its pool, by content."""
    found = []
    for layer in cache.layers:
        at, pool = getattr(layer, "metadata", None), getattr(layer, "pool", None)
        if at is None:
            found.append(None)
            continue
        rows = [
            x.words[int(block)].tobytes() for _, x in pool.stored for block in at.table[at.held()]
        ]
        ring = (
            None if layer.ring is None else (layer.ring.end.tolist(), layer.ring.pool.k.tobytes())
        )
        found.append((at.columns, at.lengths.tolist(), at.first.tolist(), rows, ring))
    return found


CASES = [
    ("llama", {}, 10), ("llama", {"kind": "int8", "rotate": True}, 3), ("gemma3", {"kind": "bf16"}, 5),
    ("llama", {"kind": "int8", "full_precision": FULL(5, 3)}, 3), ("llama", {"kind": "int8_channel"}, 5),
    ("llama", {"kind": "int4_channel", "full_precision": FULL(64, 3)}, 5), ("llama", {"k_kind": "fp8_e4m3"}, 7),
    ("deepseek_v3", {"kind": "int8"}, 1), ("gemma3n", {}, 5), ("llama4", {}, 6),
]  # fmt: skip


@pytest.mark.parametrize(("family", "options", "blocks"), CASES, ids=str)
def test_the_same_bits_and_nothing_lost(family, options, blocks):
    """Random passes, beams, crops and copies, against a cache without a budget."""
    model, limit = on_numkv(family), blocks * BLOCK // 2
    rng = np.random.default_rng(blocks)
    refused = accepted = 0
    own, other = (
        Text(model, NumkvCache(model.config, max_nbytes=x, **options), 2) for x in (limit, None)
    )
    for cache in (own.cache, other.cache):
        cache.activate_past_recording()
    for _ in range(40):
        batch = own.mask.shape[0]
        what = int(rng.integers(0, 10)) if own.mask.shape[1] else 0
        if what < 7:
            columns = int(rng.choice([1, 1, 1, 30, 130, 300]))
            ids = torch.from_numpy(rng.integers(2, 60, (batch, columns)))
            padding = torch.ones_like(ids)
            padding[0, : columns // 3] = 0 if columns > 1 and not own.mask.shape[1] else 1
            before = seen(own.cache)
            try:
                found = own.add(ids, padding)
            except numkv.CacheFull:
                refused += 1
                after = seen(own.cache)
                assert after == before if own.mask.shape[1] else not any(after)
                assert own.cache.get_seq_length() == own.mask.shape[1]
                if columns == 1:  # full
                    for text in (own, other):
                        text.cache.reset()
                        text.mask = text.mask[:, :0]
                continue
            accepted += 1
            assert torch.equal(found, other.add(ids, padding))
        elif what == 7:
            rows = torch.from_numpy(rng.integers(0, batch, 2))
            for text in (own, other):
                text.cache.reorder_cache(rows)
                text.mask = text.mask[rows]
        elif what == 8:
            some = int(rng.integers(0, min(60, own.mask.shape[1]) + 1))
            for text in (own, other):
                try:
                    text.cache.crop(-some)
                except RuntimeError:  # of sliding layers
                    continue
                text.mask = text.mask[:, : text.mask.shape[1] - some]
        else:
            own.cache = (
                copy.deepcopy(own.cache)
                if rng.random() < 0.5
                else pickle.loads(pickle.dumps(own.cache))
            )
            assert own.cache.max_nbytes == limit
        assert own.cache.nbytes <= limit
    assert refused > 1
    assert accepted > 8


def test_the_last_block_is_used(llama):
    """As many tokens fit as blocks do, whatever doubling or a capacity would have taken."""
    for capacity in (None, 300, 10_000):
        text = Text(llama, NumkvCache(llama.config, max_nbytes=7 * BLOCK + 5, capacity=capacity))
        text.add(torch.full((1, 200), 5))
        while text.mask.shape[1] < 7 * 256 - 100:
            text.add(torch.full((1, 100), 5))
        text.add(torch.full((1, 7 * 256 - text.mask.shape[1]), 5))
        assert text.cache.nbytes == 7 * BLOCK
        with pytest.raises(
            numkv.CacheFull, match="got 1 new tokens after 1792, with which they take"
        ):
            text.add(torch.full((1, 1), 5))
        text.cache.crop(-3)
        text.mask = text.mask[:, :-3]
        text.add(torch.full((1, 3), 6))


def test_padding_needs_no_room(llama):
    text = Text(llama, NumkvCache(llama.config, max_nbytes=5 * BLOCK), 4)
    given = prompts([300, 3, 2, 1])
    text.add(given["input_ids"], given["attention_mask"])
    assert text.cache.nbytes == 5 * BLOCK


@pytest.mark.parametrize(
    "options", [{"kind": "int8_channel"}, {"kind": "int8", "full_precision": FULL(64)}], ids=str
)
def test_a_pass_of_padding_alone(llama, options):
    """What its layers keep in full is counted, too."""
    ids, nothing = torch.full((1, 3), 5), torch.zeros(1, 3, dtype=torch.long)
    free = Text(llama, NumkvCache(llama.config, **options))
    free.add(ids, nothing)
    needed = sum(x.ring.pool.nbytes for x in free.cache.layers)
    for limit in (needed, needed - 1):
        text = Text(llama, NumkvCache(llama.config, max_nbytes=limit, **options))
        with pytest.raises(numkv.CacheFull) if limit < needed else contextlib.nullcontext():
            text.add(ids, nothing)
        assert text.cache.get_seq_length() == (0 if limit < needed else 3)
        assert text.cache.nbytes == (0 if limit < needed else needed)


def test_room_is_given_to_layers_that_lack_it():
    """A budget of what passes need is enough, whatever some layers have taken for later by then."""
    model = on_numkv("gemma3", sliding_window=300)
    text, needs = Text(model, NumkvCache(model.config)), []
    for _ in range(25):
        ids, layers = torch.full((1, 30), 5), text.cache.layers
        if text.mask.shape[1]:
            needs.append(
                sum((x.metadata.used + x.metadata.more(None, 30)) * x.block_nbytes for x in layers)
            )
        text.add(ids)
    assert text.cache.nbytes > max(needs)
    for limit, fits in ((max(needs), True), (max(needs) - 1, False)):
        tight = Text(model, NumkvCache(model.config, max_nbytes=limit))
        with pytest.raises(numkv.CacheFull) if not fits else contextlib.nullcontext():
            for _ in range(25):
                assert tight.add(torch.full((1, 30), 5)).shape[0] == 30


def test_memory_that_a_long_pass_leaves_again():
    """Sliding layers take the room for a long second prompt one after another."""
    model = on_numkv("mistral_sliding")
    text = Text(model, NumkvCache(model.config, max_nbytes=2**30))
    text.add(torch.full((1, 10), 5))
    of_block = text.cache.layers[0].block_nbytes
    enough = text.cache.layers[0].metadata.enough
    most = of_block * (4 * enough + -(-700 // 16))
    for limit, fits in ((most, True), (most - of_block * 8, False)):
        again = Text(model, NumkvCache(model.config, max_nbytes=limit))
        again.add(torch.full((1, 10), 5))
        if fits:
            assert again.add(torch.full((1, 690), 6)).shape[0] == 690
        else:
            with pytest.raises(numkv.CacheFull):
                again.add(torch.full((1, 690), 6))
            again.add(torch.full((1, 2), 6))


def test_beams_that_reach_it_in_the_middle(llama):
    """The error leaves the cache of the last whole pass, with which a shorter call goes on."""
    given = prompts([250])
    cache = NumkvCache(llama.config, max_nbytes=5 * BLOCK)
    with pytest.raises(numkv.CacheFull, match="got 1 new tokens after"):
        llama.generate(
            **given, past_key_values=cache, max_new_tokens=40, num_beams=4, do_sample=False
        )
    columns, rows = cache.get_seq_length(), [x.metadata.lengths.tolist() for x in cache.layers]
    assert columns == 256
    assert rows == [[columns] * 4] * 4
    cache.batch_select_indices(torch.tensor([2]))
    text = Text(llama, cache)
    text.mask = torch.ones(1, columns, dtype=torch.long)
    assert text.add(torch.full((1, 10), 5)).shape[0] == 10
    assert cache.nbytes <= 5 * BLOCK
    with pytest.raises(numkv.CacheFull, match="5 sequences"):
        full = NumkvCache(llama.config, "int8", full_precision=FULL(64), max_nbytes=BLOCK)
        Text(llama, full).add(torch.full((1, 10), 5))
        full.batch_repeat_interleave(5)
        full.batch_repeat_interleave(5)
    assert full.layers[0].metadata.batch in (1, 5)


def test_a_budget_that_is_too_small_for_a_block(llama):
    for limit in (0, 1, "1KiB", BLOCK - 1):
        cache = NumkvCache(llama.config, max_nbytes=limit)
        for _ in range(2):
            with pytest.raises(
                numkv.CacheFull, match=r"they take \d+; nothing was stored: pass fewer"
            ):
                Text(llama, cache).add(torch.full((1, 3), 5))
            assert cache.nbytes == 0
            assert cache.get_seq_length() == 0
    Text(llama, NumkvCache(llama.config, max_nbytes=BLOCK)).add(torch.full((1, 3), 5))


@pytest.mark.parametrize("value", ["lots", "-1", -1, True, 1.5, 2**80, "9999999PiB", [], ""])
def test_what_is_no_size_is_refused_as_by_a_batch(llama, value):
    found = []
    for make_one in (NumkvCache, use, ContinuousBatch):
        first = llama.config if make_one is NumkvCache else copy.deepcopy(llama)
        with pytest.raises((TypeError, ValueError)) as error:
            make_one(first, max_nbytes=value)
        found.append((type(error.value), str(error.value)))
    assert len(set(found)) == 1


def test_states_of_transformers_are_refused():
    config = make("qwen3_next").config
    with pytest.raises(numkv.NotSupported, match="no `max_nbytes` for 'qwen3_next'"):
        NumkvCache(config, max_nbytes="1GiB")
    with pytest.raises(numkv.NotSupported, match="no `max_nbytes`"):
        use(make("lfm2"), max_nbytes=1)


def test_use(llama):
    model = use(copy.deepcopy(llama), "int8", max_nbytes="256KiB")
    given = prompts([60, 9])
    found = model.generate(**given, max_new_tokens=20, do_sample=False)
    expected = use(model, "int8").generate(**given, max_new_tokens=20, do_sample=False)
    assert torch.equal(found, expected)
    use(model, max_nbytes=BLOCK)
    with pytest.raises(numkv.CacheFull):
        model.generate(**given, max_new_tokens=20, do_sample=False)
    restore(model)


def test_files_keep_it(llama, tmp_path):
    cache = NumkvCache(llama.config, max_nbytes=3 * BLOCK)
    text = Text(llama, cache)
    text.add(torch.full((1, 500), 5))
    numkv.save(tmp_path / "cache", cache, mark="m")
    text.cache = numkv.load(tmp_path / "cache", mark="m")
    assert text.cache.max_nbytes == 3 * BLOCK
    with pytest.raises(numkv.CacheFull):
        text.add(torch.full((1, 300), 5))
    text.add(torch.full((1, 268), 5))


def test_a_copy_has_a_budget_of_its_own(llama):
    text = Text(llama, NumkvCache(llama.config, max_nbytes=BLOCK))
    text.add(torch.full((1, 250), 5))
    twin = Text(llama, copy.deepcopy(text.cache))
    twin.mask = text.mask
    shallow = copy.copy(text.cache)
    for each in (text, twin):
        each.add(torch.full((1, 6), 5))
        with pytest.raises(numkv.CacheFull):
            each.add(torch.full((1, 1), 5))
    assert shallow.get_seq_length() == 256
    text.cache.crop(-6)


@pytest.mark.parametrize("family", ["llama", "gemma3", "deepseek_v3"])
def test_memory_is_free_once_nothing_holds_a_cache(family):
    """Without the garbage collector: a budget would be exceeded by caches that wait for it."""
    model = on_numkv(family)
    cache = NumkvCache(model.config, "int8", max_nbytes="1MiB")
    layer = weakref.ref(cache.layers[0])
    gc.collect()
    gc.disable()
    try:
        model.generate(**prompts([9, 4]), past_key_values=cache, max_new_tokens=5, do_sample=False)
        del cache
        assert layer() is None
    finally:
        gc.enable()


def test_memory_that_runs_out_while_layers_grow(llama, monkeypatch):
    """Some layers have more room then; all have their tokens."""
    text = Text(llama, NumkvCache(llama.config, max_nbytes="1GiB"))
    expected = Text(llama, NumkvCache(llama.config))
    for each in (text, expected):
        each.add(torch.full((1, 250), 5))
    before, like, left = seen(text.cache), numkv.storage.pool.Pool.like, [2]

    def few(self, num_blocks):
        left[0] -= 1
        if left[0] < 0:
            raise MemoryError
        return like(self, num_blocks)

    monkeypatch.setattr(numkv.storage.pool.Pool, "like", few)
    with pytest.raises(MemoryError):
        text.add(torch.full((1, 100), 6))
    monkeypatch.undo()
    assert seen(text.cache) == before
    ids = torch.full((1, 9), 6)
    assert torch.equal(text.add(ids), expected.add(ids))


def test_threads_have_caches_of_their_own(llama):
    ends = []

    def run():
        text = Text(llama, NumkvCache(llama.config, max_nbytes=2 * BLOCK))
        try:
            while True:
                text.add(torch.full((1, 64), 5))
        except numkv.CacheFull:
            ends.append((text.mask.shape[1], text.cache.nbytes))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ends == [(512, 2 * BLOCK)] * 4
