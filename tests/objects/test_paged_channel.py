"""Keys by channel in a `PagedKVCache`, against a plain model of what it must hold."""

import copy
import pickle

import numpy as np
import pytest
from channel_model import KEEPS, Sequence, close, shift_tables, turned

import numkv
from numkv.caches.paged.block_bytes import BlockBytes

KINDS = ["int8_channel", "int4_channel_fine", "int4_channel"]
HEADS, Q_HEADS, DIM = 2, 4, 32


def make(kind="int8_channel", target="cpu", **options):
    options = {"num_blocks": 64, "block_size": 64} | options
    layer = {x: options.pop(x) for x in ("full_precision", "key_bounds") if x in options}
    if layer:
        options["layers"] = [numkv.LayerSpec(HEADS, DIM, kind=kind, **layer)] * 2
        return numkv.PagedKVCache(target=target, **options)
    return numkv.PagedKVCache(2, HEADS, DIM, kind=kind, target=target, **options)


def rows(rng, n, outlier=True):
    k, v = rng.standard_normal((2, n, HEADS, DIM)).astype(np.float32)
    if outlier:
        k[:, :, 3] += 50
    return k, v


def queries(rng, n):
    q = rng.standard_normal((n, Q_HEADS, DIM)).astype(np.float32)
    q[:, :, 3] /= 50
    return q


class Played:
    """A cache and its model."""

    limit = 2e-4

    def __init__(self, cache, rng, to, host, kind):
        self.cache, self.rng, self.to, self.host, self.kind = cache, rng, to, host, kind
        self.model, layer = {}, cache.layers[0]
        self.sparse = layer.key_bounds
        self.sinks = 0 if layer.full_precision is None else layer.full_precision.num_sink_tokens

    def add(self):
        seq = self.cache.add()
        self.model[seq] = Sequence.empty(HEADS, DIM, self.kind, self.sinks)
        return seq

    def step(self, seqs, lens, accepted=None, write=False, ids=None, new=None, sparse=None):
        """Append to both layers, attend with every new token, and keep what is accepted.

        Blocks are chosen for every token as well, which takes long; the model chooses for some of them.
        """
        sparse = self.sparse if sparse is None else sparse
        new = [rows(self.rng, n) for n in lens] if new is None else new
        k, v = (np.concatenate(x) for x in zip(*new, strict=True))
        q = queries(self.rng, sum(lens))
        step = self.cache.reserve(seqs, lens)
        for layer in range(2):
            if write and layer:
                qkv = np.concatenate([x.reshape(len(x), -1) for x in (q, k, v)], axis=1)
                step.write(layer, self.to(qkv), num_q_heads=Q_HEADS, qk_mode=numkv.QKMode.COPY)
            else:
                step.append(layer, self.to(k), self.to(v))
            out, first = self.host(step.attention(layer, self.to(q))), 0
            if sparse:
                most = int(self.rng.integers(2, 5))
                by_choice = self.host(step.sparse_attention(layer, self.to(q), most_blocks=most))
            for seq, (of_k, of_v) in zip(seqs, new, strict=True):
                longer, n = self.model[seq].extended(of_k, of_v), len(of_k)
                places = range(len(longer) - n, len(longer))
                wanted = longer.attended(q[first : first + n], places)
                close(out[first : first + n], wanted, self.limit)
                if sparse:
                    some = np.unique(np.linspace(0, n - 1, 12).astype(int))
                    wanted = longer.attended_sparsely(
                        q[first + some], some + places[0], self.cache.block_size, most
                    )
                    close(by_choice[first + some], wanted, self.limit)
                first += n
        if accepted is None:
            self.cache.commit(step, token_ids=ids)
        elif any(accepted):
            self.cache.commit(step, np.array(accepted))
        else:
            self.cache.rollback(step)
        for i, (seq, (of_k, of_v)) in enumerate(zip(seqs, new, strict=True)):
            n = len(of_k) if accepted is None else accepted[i]
            self.model[seq] = self.model[seq].extended(of_k[:n], of_v[:n])

    def truncate(self, seq, length):
        self.cache.truncate(seq, length)
        self.model[seq] = self.model[seq].truncated(length)

    def look(self):
        """At the newest token of every sequence."""
        seqs = [seq for seq, of in self.model.items() if len(of)]
        q = queries(self.rng, len(seqs))
        for layer in range(2):
            out = self.host(self.cache.decode_attention(layer, seqs, self.to(q)))
            for i, seq in enumerate(seqs):
                of = self.model[seq]
                close(out[i : i + 1], of.attended(q[i : i + 1], [len(of) - 1]), self.limit)
        self.cache.check()


@pytest.fixture
def play(target, rng, to, host):
    def begin(kind, **options):
        return Played(make(kind, target, **options), rng, to, host, kind)

    return begin


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block_size", [64, 128])
def test_steps(play, kind, block_size):
    """Prompts that end in a group, at its end and past it; then token by token over that."""
    p = play(kind, block_size=block_size)
    a, b = p.add(), p.add()
    p.step([a, b], [200, 62], write=True)
    for _ in range(3):
        p.step([a, b], [1, 1])
        p.look()
    p.step([b, a], [64, 130])
    p.look()


@pytest.mark.kernels
@pytest.mark.parametrize(
    "kind", ["int8_channel", pytest.param("int4_channel", marks=pytest.mark.nightly)]
)
def test_steps_on_kernels(play, kind):
    p = play(kind)
    a, b = p.add(), p.add()
    p.step([a, b], [66, 3], write=True)
    p.step([a, b], [1, 2])
    p.look()


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_in_parts_makes_the_same_codes(play, kind):
    """Whatever the steps; results are those of one step."""
    p = play(kind)
    k, v = rows(p.rng, 200)
    found = []
    for parts in ([200], [63, 1, 70, 66], [130, 70]):
        seq, first = p.cache.add(), 0
        for n in parts:
            step = p.cache.reserve([seq], [n])
            for layer in range(2):
                step.append(layer, p.to(k[first : first + n]), p.to(v[first : first + n]))
            p.cache.commit(step)
            first += n
        of = p.cache.swap_out(seq)
        whole = [x[:3] for buffers in of.buffers for x in buffers[2:3] if x.shape[0] >= 3]
        found.append([x.tobytes() for x in whole])
    assert found[0]
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("kind", KINDS)
def test_rollback_and_accepted_drafts_are_exact(play, kind):
    """A step that fills a group, and is taken back in it: its rows in full are there."""
    p = play(kind)
    a = p.add()
    p.step([a], [60])
    p.step([a], [10], accepted=[0])
    p.look()
    p.step([a], [80], accepted=[2])
    p.look()
    p.step([a], [1])
    p.step([a], [70], accepted=[1])  # at the end of the group
    p.look()
    p.step([a], [66])
    p.look()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block_size", [64, 128])
def test_truncate(play, kind, block_size):
    """Into the newest group, whose rows are there; into one that was quantised, which fills again."""
    p = play(kind, block_size=block_size)
    a = p.add()
    p.step([a], [190])
    p.truncate(a, 170)
    p.look()
    if block_size == 64:
        p.truncate(a, 100)
        p.look()
        p.step([a], [90], accepted=[0])
        p.look()
        p.step([a], [90], accepted=[20])
        p.look()
        p.step([a], [40])
        p.look()
    p.truncate(a, 64)
    p.step([a], [5])
    p.look()
    p.truncate(a, 0)
    p.step([a], [70])
    p.look()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("block_size", "first"), [(64, 0), (64, 4), (128, 70)])
def test_sparse_reading(play, kind, block_size, first):
    """Of blocks of codes; the newest group is read in any case, and first tokens in full."""
    kept = numkv.FullPrecision(num_sink_tokens=first) if first else None
    p = play(kind, num_blocks=96, block_size=block_size, full_precision=kept, key_bounds=True)
    a, b = p.add(), p.add()
    p.step([a, b], [600, 62], sparse=False)
    p.step([a, b], [1, 1])
    p.step([b, a], [64, 3], accepted=[3, 2])
    if block_size == 64:
        p.truncate(a, 480)
    p.step([a], [5])
    p.step([a, b], [90, 1])
    p.step([a], [1])


@pytest.mark.kernels
@pytest.mark.parametrize(
    "kind", ["int8_channel", pytest.param("int4_channel", marks=pytest.mark.nightly)]
)
def test_sparse_reading_on_kernels(target, to, host, rng, kind):
    """Where a sequence has no more blocks than are read: what attention gives."""
    p = Played(make(kind, target, key_bounds=True), rng, to, host, kind)
    a, b = p.add(), p.add()
    for lens in ([260, 70], [1, 1]):
        new = [rows(rng, n) for n in lens]
        step = p.cache.reserve([a, b], lens)
        for layer in range(2):
            step.append(layer, *(to(np.concatenate(x)) for x in zip(*new, strict=True)))
        for seq, of in zip((a, b), new, strict=True):
            p.model[seq] = p.model[seq].extended(*of)
        if step.num_tokens > 2:
            p.cache.commit(step)
    q = queries(rng, 2)
    found = host(step.sparse_attention(1, to(q), most_blocks=3))
    dense = host(step.attention(1, to(q)))
    for i, of in enumerate(p.model.values()):
        wanted = of.attended_sparsely(q[i : i + 1], [len(of) - 1], 64, 3)
        close(found[i : i + 1], wanted)
    assert abs(found[0] - dense[0]).max() > 1e-3
    assert np.array_equal(found[1], dense[1]) or target != "cpu"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block_size", [64, 128])
def test_forks(play, kind, block_size):
    """In the middle of a group, each goes on alone; in one that one of them has cut."""
    p = play(kind, block_size=block_size)
    a = p.add()
    p.step([a], [150])
    b = p.cache.fork(a)
    p.model[b] = p.model[a]
    p.step([a, b], [30, 50])
    p.look()
    c = p.cache.fork(b)
    p.model[c] = p.model[b]
    if block_size == 64:
        p.truncate(b, 100)
    p.step([b, c], [40, 3])
    p.look()
    p.cache.remove(a)
    del p.model[a]
    p.step([c], [60])
    p.look()


@pytest.mark.parametrize("kind", KINDS)
def test_prefixes(play, kind):
    """Codes follow from tokens: who finds a prefix reads what others have quantised."""
    p = play(kind, key_bounds=True)
    ids = np.arange(200, dtype=np.int32)
    a = p.cache.add(ids)
    p.model[a] = Sequence.empty(HEADS, DIM, kind)
    p.step([a], [200], ids=ids)
    other = np.concatenate([ids[:150], ids[:60] + 900])
    b = p.cache.add(other)
    found = p.cache.cached_len(b)
    assert found == 150  # the rest of the block is copied, and its twin's
    p.model[b] = Sequence(p.model[a].k[:found], p.model[a].v[:found], kind)
    p.step([b], [70])
    p.look()
    p.cache.remove(a)
    del p.model[a]
    # Evicts what no sequence has, rows in full as well.
    p.step([p.add()], [p.cache.num_free // 3 * 64], sparse=False)
    c = p.cache.add(other)
    assert p.cache.cached_len(c) == 128
    p.model[c] = Sequence(p.model[b].k[:128], p.model[b].v[:128], kind)
    p.step([c], [9])
    p.look()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block_size", [64, 128])
def test_nobody_finds_what_was_made_of_decoded_rows(play, kind, block_size):
    """A group that was cut and filled again has other codes than its tokens' name says."""
    p = play(kind, num_blocks=24, block_size=block_size)
    ids = np.arange(192, dtype=np.int32)
    a = p.cache.add(ids)
    p.model[a] = Sequence.empty(HEADS, DIM, kind)
    p.step([a], [192], ids=ids)
    p.truncate(a, 30)
    p.step([a], [30], ids=ids[30:60])
    others = []
    while p.cache.num_free >= 3:  # evict what was named before
        others.append(p.add())
        p.step(others[-1:], [block_size])
    for seq in others:
        p.cache.remove(seq)
        del p.model[seq]
    p.step([a], [100], ids=ids[60:160])
    p.look()
    other = np.concatenate([ids[:160], ids[:9]])
    assert p.cache.cached_len(p.cache.add(other)) == 0
    p.truncate(a, 0)  # from the beginning its tokens are known again
    p.step([a], [block_size + 1], ids=ids[: block_size + 1])
    assert p.cache.cached_len(p.cache.add(other)) >= block_size


def stored_in(folder):
    return numkv.store.PrefixStore(folder, mark="a model", host_nbytes=2**24)


def played_prompt(p, ids, k, v, parts):
    """A sequence with these tokens, in steps of so many at most; its outputs, and how much of it was found."""
    seq, found, q = p.cache.add(ids), [], queries(np.random.default_rng(5), len(ids))
    begin = first = p.cache.cached_len(seq)
    while begin < len(ids):
        end = min(len(ids), begin + parts)
        step = p.cache.reserve([seq], [end - begin])
        for layer in range(2):
            step.append(layer, p.to(k[begin:end]), p.to(v[begin:end]))
            found.append(p.host(step.attention(layer, p.to(q[begin:end])))[-1])
        p.cache.commit(step, token_ids=ids[begin:end])
        begin = end
    return seq, found[-2:], first


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block_size", [64, 128])
def test_a_store_gives_what_was_computed_alone(play, kind, block_size, tmp_path):
    """After a restart, to the bit: codes, scales and zero points; and what follows from them."""
    n = 3 * block_size + 7
    ids, (k, v) = np.arange(n, dtype=np.int32), rows(np.random.default_rng(3), n)
    alone = play(kind, block_size=block_size)
    seq, wanted, _ = played_prompt(alone, ids, k, v, 50)
    for turn, parts in enumerate((n, 33)):
        p = play(kind, block_size=block_size, store=stored_in(tmp_path))
        made, found, first = played_prompt(p, ids, k, v, parts)
        assert first == 3 * block_size * turn
        for x, y in zip(found, wanted, strict=True):
            close(x, y)
        each, q = ((p, made), (alone, seq)), p.to(queries(np.random.default_rng(6), 1))
        whole = [
            [x[:3].tobytes() for part in of.cache.swap_out(i).buffers for x in part if len(x) > 3]
            for of, i in each
        ]
        assert whole[0]
        assert whole[0] == whole[1]
        outs = [
            [p.host(of.cache.decode_attention(layer, [i], q)).tobytes() for layer in range(2)]
            for of, i in each
        ]
        assert outs[0] == outs[1]
        p.model[made] = Sequence(k, v, kind)
        p.step([made], [block_size])
        p.look()
        assert p.cache.store.flush() == 0
        assert p.cache.store.stats().written == 3 * (1 - turn)  # codes alone: no rows in full
        p.cache.store.close()


def test_a_lookup_brings_prefixes_by_channel(play, tmp_path):
    """Beside steps; blocks that the pool has evicted come back from host memory."""
    ids, (k, v) = np.arange(200, dtype=np.int32), rows(np.random.default_rng(3), 200)
    p = play("int4_channel", num_blocks=16, store=stored_in(tmp_path), key_bounds=True)
    seq, wanted, _ = played_prompt(p, ids, k, v, 200)
    p.cache.remove(seq)
    p.step([p.add()], [p.cache.num_free // 3 * 64], sparse=False)
    p.cache.remove(p.model.popitem()[0])
    lookup = p.cache.lookup(ids)
    assert lookup.future.result() == 192
    again = p.cache.add(ids, lookup=lookup)
    assert p.cache.cached_len(again) == 192
    p.cache.check()
    p.model[again] = Sequence(k[:192], v[:192], "int4_channel")
    p.step([again], [60])
    p.look()
    p.cache.store.close()


def test_first_tokens_in_full_have_no_place_in_a_store(tmp_path):
    kept = numkv.FullPrecision(num_sink_tokens=4)
    layer = numkv.LayerSpec(2, 32, kind="int8_channel", full_precision=kept)
    with pytest.raises(numkv.NotSupported, match=r"`store`: .*full precision"):
        numkv.PagedKVCache(layers=[layer], num_blocks=9, block_size=64, store=stored_in(tmp_path))


def test_damaged_scales_are_not_taken():
    """Zero points may be negative, scales not."""
    cache = make()
    content = BlockBytes.of_pools(cache._target, [cache._store.place(0)[0]])
    for sign, sound in ((1, True), (-1, False)):
        block = [np.zeros(x[:1].nbytes, np.uint8) for x in content._arrays]
        at = next(i for i, of in enumerate(content._kinds) if of is not None and of.group_tokens)
        x = block[at].view(content._arrays[at].dtype).reshape(content._arrays[at].shape[1:])
        words = np.array([sign, -1], np.float32).astype(content._kinds[at].scale_dtype)
        x[..., :DIM], x[..., DIM:] = words.view(x.dtype)
        assert content.sound(block) is sound


@pytest.mark.parametrize("kind", KINDS)
def test_copies_swaps_files_and_pickles(play, kind, tmp_path, target):
    p = play(kind, key_bounds=True)
    a, b = p.add(), p.add()
    p.step([a, b], [140, 64])
    swapped = p.cache.swap_out(a)
    again = p.cache.swap_in(swapped)
    p.model[again] = p.model[a]
    numkv.save(tmp_path / "x.numkv", p.cache)
    made = [p.cache.copy(), numkv.load(tmp_path / "x.numkv", target=target)]
    if target == "cpu":
        made += [pickle.loads(pickle.dumps(p.cache)), copy.deepcopy(p.cache)]
    for cache in made:
        other = Played(cache, p.rng, p.to, p.host, kind)
        other.model = dict(p.model)
        other.look()
        other.step([a, b, again], [70, 1, 60])
        other.look()
    p.look()
    with pytest.raises(numkv.DimensionMismatch, match="geometry"):
        make("int8", target).swap_in(swapped)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block_size", [64, 128])
@pytest.mark.parametrize("length", [110, 64, 30])
def test_files_of_a_truncated_sequence(play, kind, block_size, length, tmp_path, target):
    """A file has codes and scales of the group that a truncation has cut; so has that of a swapped sequence."""
    p = play(kind, block_size=block_size)
    a = p.add()
    p.step([a], [270])
    p.truncate(a, length)
    p.look()
    numkv.save(tmp_path / "cache.numkv", p.cache)
    other = Played(numkv.load(tmp_path / "cache.numkv", target=target), p.rng, p.to, p.host, kind)
    other.model = dict(p.model)
    numkv.save(tmp_path / "one.numkv", p.cache.swap_out(a))
    again = other.cache.swap_in(numkv.load(tmp_path / "one.numkv"))
    other.model[again] = p.model[a]
    other.look()
    other.step([a, again], [70, 1])
    other.look()


@pytest.mark.parametrize("kind", KINDS)
def test_windows_mixed_layers_and_sinks(target, rng, to, host, kind):
    """Keys by channel beside others; a sliding layer; first tokens in full."""
    spec = numkv.LayerSpec(
        HEADS, DIM, kind=kind, full_precision=numkv.FullPrecision(num_sink_tokens=4)
    )
    sliding = numkv.LayerSpec(
        HEADS, DIM, kind=kind, full_precision=spec.full_precision, window_left=99
    )
    plain = numkv.LayerSpec(HEADS, DIM, kind="fp16", full_precision=spec.full_precision)
    cache = numkv.PagedKVCache(
        layers=[spec, sliding, plain], num_blocks=64, block_size=64, target=target
    )
    assert cache.layers[:2] == (spec, sliding) or cache.layers[0].kind.name == kind
    seq, model = cache.add(), Sequence.empty(HEADS, DIM, kind)
    for n in (100, 1, 130, 1):
        (k, v), q = rows(rng, n), queries(rng, n)
        step, model = cache.reserve([seq], [n]), model.extended(k, v)
        for layer in range(3):
            x = (k, v) if layer < 2 else (k.astype(np.float16), v.astype(np.float16))
            step.append(layer, *map(to, x))
        places = range(len(model) - n, len(model))
        found = host(step.attention(1, to(q)))
        close(found, model.attended(q, places, window=99))
        exact = Sequence(model.k, model.v, kind, sinks=4)
        close(host(step.attention(0, to(q))), exact.attended(q, places))
        cache.commit(step)
    cache.check()


@pytest.mark.parametrize("kinds", [("int8", "int8_channel"), ("int8_channel", "int8")])
def test_what_is_read_in_full_depends_on_no_other_layer(target, rng, to, host, kinds):
    """Keys by channel are in full in their newest group, others in the window."""
    (k, v), q, found = rows(rng, 30, outlier=False), 4 * queries(rng, 30), []
    for of in (kinds[:1], kinds[1:], kinds):
        layers = [
            numkv.LayerSpec(HEADS, DIM, kind=kind, full_precision=numkv.FullPrecision(5, 3))
            for kind in of
        ]
        cache = numkv.PagedKVCache(layers=layers, num_blocks=16, block_size=64, target=target)
        step = cache.reserve([cache.add()], 30)
        for layer in range(len(of)):
            step.append(layer, to(k), to(v))
            found.append(host(step.attention(layer, to(q))))
    assert np.array_equal(found[0], found[2])
    assert np.array_equal(found[1], found[3])


def test_rows_of_16_bits(rng):
    """In a twin of 16 bits codes are made of its rows."""
    kept = numkv.FullPrecision(window=64, kind="bf16")
    cache = numkv.PagedKVCache(
        layers=[numkv.LayerSpec(HEADS, DIM, kind="int8_channel", full_precision=kept)], num_blocks=9, block_size=64
    )  # fmt: skip
    seq, (k, v) = cache.add(), rows(rng, 100)
    bf16 = numkv.kind("bf16").dtype
    step = cache.reserve([seq], [100])
    step.append(0, k.astype(bf16), v.astype(bf16))
    model = Sequence(*(x.astype(bf16).astype(np.float32) for x in (k, v)), "int8_channel")
    q = queries(rng, 100)
    close(step.attention(0, q), model.attended(q, range(100)))


def test_bad_rows(target, to, rng):
    cache = make(target=target)
    step = cache.reserve([cache.add()], [80])
    k, v = rows(rng, 80)
    k[3, 1, 2] = np.nan
    with pytest.raises(numkv.NonFiniteInput, match=r"`k`.*int8_channel.*\(3, 1, 2\)"):
        step.append(0, to(k), to(v))


def test_bytes():
    """8.5 and 4.5 bits an element, whatever D; V as rows of the same width."""
    assert make("int8_channel").layers[0].v_kind.name == "int8"
    assert make("int4_channel").layers[0].v_kind.name == "int4"


def refusals():
    """What to do, and what the error says."""
    of = numkv.LayerSpec

    def cache(**options):
        return make(**options)

    yield (lambda: cache(block_size=16)), r"`block_size`: .*multiple of 64.*choose 64"
    yield (lambda: cache(rotate=True)), r"`rotate`: .*mixes the channels"
    yield (lambda: of(2, 32, v_kind="int8_channel")), r"`v_kind`: .*take int8"
    yield (
        (lambda: of(2, 32, kind="int8_channel", v_kind="latent", head_dim_v=8)),
        r"`kind`: .*PagedKVCache",
    )
    full = numkv.FullPrecision(window=65)
    for options, said in (
        ({"window_left": 40}, r"window of 41.*bf16"),
        ({"chunk_size": 128}, r"`kind`: .*chunks"),
        ({"full_precision": full}, r"`full_precision`: .*at most 64 tokens"),
    ):
        layers = [of(2, 32, kind="int8_channel", **options)]
        yield (lambda x=layers: numkv.PagedKVCache(layers=x, num_blocks=9, block_size=64)), said
    call = numkv.CausalCache().init
    yield (lambda: call("int4_channel", 1, 1, 1)), r"PagedKVCache, or take int4"
    yield (lambda: cache().bind(4)), r"bind: .*by channel"
    yield (lambda: cache().step_buffers(1)), r"step_buffers: .*by channel"
    yield (lambda: cache().arrays(0)), r"arrays: .*by channel"
    c = cache()
    seq = c.add()
    yield (lambda: c.reserve([seq], [2], parents=[-1, 0])), r"parents: .*by channel"


def test_what_is_refused_says_what_to_do_instead():
    for number, (call, said) in enumerate(refusals()):
        with pytest.raises(numkv.NumkvError, match=said):
            call()
            raise AssertionError(number)


@pytest.mark.parametrize("shifts", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_compaction(play, kind, shifts):
    """Whole groups before the first token that moves stay as they are; the rest is quantised anew, and goes on."""
    for block_size, length in ((64, 200), (128, 192), (64, 40)):
        for keep in KEEPS.values():
            p = play(kind, block_size=block_size)
            if shifts:  # in float32, so that a code may be its neighbour
                p.limit = 2e-3 if kind == "int8_channel" else 2e-2
            a = p.add()
            p.step([a], [length])
            b = p.cache.fork(a)
            p.model[b] = p.model[a]
            kept = list(keep(length))
            p.cache.compact(a, kept, numkv.rope_shift(*shift_tables(DIM)) if shifts else None)
            p.model[a] = p.model[a].compacted(kept, turned if shifts else None)
            assert p.cache.length(a) == len(kept)
            p.look()  # of the other one, too
            p.step([a, b], [70, 3])
            p.look()
            p.cache.remove(a)
            p.cache.remove(b)
            p.cache.check()
            assert p.cache.num_free == p.cache.num_blocks


@pytest.mark.parametrize("kind", ["code4", "code6"])
def test_compaction_moves_other_layers_bit_for_bit(kind, rng, target, to, host):
    """Rows beside a layer by channel are those of a cache of their own; quantised again they would change."""
    other = numkv.LayerSpec(HEADS, DIM, kind=kind)
    specs = [numkv.LayerSpec(HEADS, DIM, kind="int8_channel"), other]
    mixed, alone = (
        numkv.PagedKVCache(layers=x, num_blocks=40, block_size=64, target=target)
        for x in (specs, [other])
    )
    k, v = rows(rng, 150)
    for cache in (mixed, alone):
        step = cache.reserve([cache.add()], [150])
        for layer in range(cache.num_layers):
            step.append(layer, to(k), to(v))
        cache.commit(step)
    turn = numkv.rope_shift(*shift_tables(DIM))
    for dropped, shift in (([101], None), ([70, 120], None), ([110], turn)):
        keep = np.delete(np.arange(alone.length(0)), dropped)
        for cache in (mixed, alone):
            cache.compact(0, keep, shift)
        # In the last round keys are shifted and quantised again; with such queries values alone count.
        q = to(queries(rng, 1) * (shift is None))
        out, wanted = mixed.decode_attention(1, [0], q), alone.decode_attention(0, [0], q)
        assert np.array_equal(host(out), host(wanted))
    q, stay = to(queries(rng, 1)), to(np.array([[0, 110]]))
    out = mixed.decode_attention(1, [0], q, ranges=stay)
    assert np.array_equal(host(out), host(alone.decode_attention(0, [0], q, ranges=stay)))


def test_a_compaction_behind_a_window_is_refused_by_its_argument(rng, target, to):
    """A group begins before the tokens that another layer's window still covers."""
    specs = [
        numkv.LayerSpec(HEADS, DIM, kind="int8_channel"),
        numkv.LayerSpec(HEADS, DIM, window_left=40),
    ]
    cache = numkv.PagedKVCache(layers=specs, num_blocks=40, block_size=64, target=target)
    k, v = rows(rng, 150)
    step = cache.reserve([cache.add()], [150])
    for layer in range(2):
        step.append(layer, to(k), to(v))
    cache.commit(step)
    free = cache.num_free
    with pytest.raises(
        numkv.NotSupported, match=r"`keep`: .* group that begins at 64, .* newer tokens"
    ):
        cache.compact(0, np.delete(np.arange(150), 101))
    assert (cache.length(0), cache.num_free) == (150, free)
    cache.check()
    cache.compact(0, np.delete(np.arange(150), 140))


@pytest.mark.parametrize("full", ["fp32", "bf16"])
def test_compaction_keeps_what_is_in_full(rng, target, to, host, full):
    """The first tokens of all layers, and the newest ones of one whose keys are stored row by row."""
    kept = numkv.FullPrecision(8, 4, kind=full)
    layers = [
        numkv.LayerSpec(HEADS, DIM, kind=kind, v_kind="int4", full_precision=kept)
        for kind in ("int4", "int4_channel")
    ]
    cache = numkv.PagedKVCache(layers=layers, num_blocks=64, block_size=64, target=target)
    (k, v), seq = rows(rng, 100, outlier=False), cache.add()
    step = cache.reserve([seq], 100)
    for layer in range(2):
        step.append(layer, to(k), to(v))
    cache.commit(step)
    with pytest.raises(numkv.NotSupported, match="keep tokens 0 to 3"):
        cache.compact(seq, range(2, 100))
    assert cache.length(seq) == 100
    for gone in (50, 70, 90):
        keep = np.delete(np.arange(len(k)), gone)
        cache.compact(seq, keep)
        k, v = k[keep], v[keep]
    for layer in range(2):
        for token in (0, 3, -8, -1):
            q = np.repeat(k[token], 2, 0)[None] * 9
            found = host(cache.decode_attention(layer, [seq], to(q)))
            np.testing.assert_allclose(
                found[0, ::2], v[token], atol=2e-2 if full == "bf16" else 1e-3
            )


def test_compaction_without_room_changes_nothing(play):
    p = play("int8_channel", num_blocks=16)
    a = p.add()
    p.step([a], [300])
    free = p.cache.num_free
    with pytest.raises(numkv.CacheFull):
        p.cache.compact(a, range(1, 300))
    assert p.cache.num_free == free
    p.look()
    with pytest.raises(IndexError):
        p.cache.compact(a, [300])
    with pytest.raises(IndexError):  # past the shift's tables
        p.cache.compact(a, [0, 299], numkv.rope_shift(np.ones((9, 16)), np.zeros((9, 16))))
    for keep in ([0, 299], range(64)):  # some tokens move, or none
        with pytest.raises(TypeError, match="rope_shift"):
            p.cache.compact(a, keep, ...)
    p.look()
    p.cache.compact(a, range(250, 300))
    p.model[a] = p.model[a].compacted(range(250, 300))
    p.look()


@pytest.mark.parametrize("kind", KINDS)
def test_attention_weights(play, kind):
    """Of the queries of a step, for its sequences, and of a sequence's newest ones."""
    p = play(kind)
    a, b = p.add(), p.add()
    p.step([a, b], [100, 63])
    lens = [70, 2]
    new = [rows(p.rng, n) for n in lens]
    k, v = (np.concatenate(x) for x in zip(*new, strict=True))
    q = queries(p.rng, sum(lens))
    step = p.cache.reserve([a, b], lens)
    with pytest.raises(numkv.NumkvError, match="without"):
        step.attention_weights(0, p.to(q))
    for layer in range(2):
        step.append(layer, p.to(k), p.to(v))
        _, lse = step.attention(layer, p.to(q), return_lse=True)
        found = [p.host(step.attention_weights(layer, p.to(q), lse=x)) for x in (None, lse)]
        for weights in found:
            for i, (seq, some) in enumerate(zip((a, b), new, strict=True)):
                longer = p.model[seq].extended(*some)
                of = q[:70] if i == 0 else q[70:]
                np.testing.assert_allclose(weights[i, :, : len(longer)], longer.mass(of), atol=2e-4)
                assert not weights[i, :, len(longer) :].any()
    p.cache.commit(step)
    for seq, some in zip((a, b), new, strict=True):
        p.model[seq] = p.model[seq].extended(*some)
    for seq, n in ((a, 1), (b, 1), (a, 20)):
        q = queries(p.rng, n)
        found = p.host(p.cache.attention_weights(0, seq, p.to(q)))
        np.testing.assert_allclose(found, p.model[seq].mass(q), atol=2e-4)


def live(kind, seed):
    """Steps, drafts, forks, cuts, compactions and swaps of a few sequences, one after another."""
    rng = np.random.default_rng([seed, 7])
    bounds = {"key_bounds": seed % 4 == 0}  # whose reference takes most of the time
    p = Played(make(kind, num_blocks=96, **bounds), rng, lambda x: x, np.asarray, kind)
    p.add()
    for _ in range(40):
        live = list(p.model)
        seq = int(rng.choice(live))
        what = rng.integers(0, 7)
        if what <= 1:
            p.step([seq], [int(rng.integers(1, 90))], write=bool(rng.integers(2)))
        elif what == 2:
            n = int(rng.integers(1, 80))
            p.step([seq], [n], accepted=[int(rng.integers(0, n + 1))])
        elif what == 3 and len(live) < 5:
            made = p.cache.fork(seq)
            p.model[made] = p.model[seq]
        elif what == 4 and len(p.model[seq]):
            p.truncate(seq, int(rng.integers(0, len(p.model[seq]) + 1)))
        elif what == 5:
            made = p.cache.swap_in(p.cache.swap_out(seq))
            p.model[made] = p.model.pop(seq)
            p.cache.remove(seq)
        elif what == 6:
            kept = np.flatnonzero(rng.random(len(p.model[seq])) < rng.choice([0.3, 0.98]))
            p.cache.compact(seq, kept)
            p.model[seq] = p.model[seq].compacted(kept)
        if len(p.model[min(p.model)]) > 500:
            first = min(p.model)
            p.cache.remove(first)
            del p.model[first]
        if not p.model:
            p.add()
        p.look()


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("kind", KINDS)
def test_random_lives(kind, seed):
    live(kind, seed)


@pytest.mark.nightly
@pytest.mark.parametrize("kind", KINDS)
def test_many_random_lives(kind):
    for seed in range(8, 500):
        live(kind, seed)


def rows_of(ids, start):
    """The rows of tokens from a position on: what an id and a position make, whatever was before."""
    made = [rows(np.random.default_rng([int(x), start + i]), 1) for i, x in enumerate(ids)]
    if not made:
        return rows(np.random.default_rng(0), 0)
    return tuple(np.concatenate(x) for x in zip(*made, strict=True))


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", KINDS)
def test_random_lives_of_prompts(kind, seed, tmp_path):
    """Prompts that begin alike, found in the pool and, after restarts, in a store; forks, drafts, cuts and swaps."""
    rng = np.random.default_rng([seed, 11])
    begin = rng.integers(0, 9, 200)
    found = 0

    def opened():
        store = stored_in(tmp_path)
        cache = make(kind, num_blocks=64, store=store, key_bounds=seed % 3 == 0)
        return Played(cache, rng, lambda x: x, np.asarray, kind)

    def go_on(seq, ids, **options):
        start = len(p.model[seq])
        p.step([seq], [len(ids)], new=[rows_of(ids, start)], ids=ids, **options)

    p = opened()
    for _ in range(40):
        live = list(p.model)
        what = rng.integers(0, 8) if live else 0
        seq = int(rng.choice(live)) if live else -1
        if what <= 1 and len(live) < 4:
            ids = np.concatenate(
                [begin[: rng.integers(1, 200)], rng.integers(0, 9, rng.integers(1, 90))]
            )
            made = p.cache.add(ids)
            start = p.cache.cached_len(made)
            found += start
            p.model[made] = Sequence.empty(HEADS, DIM, kind).extended(*rows_of(ids[:start], 0))
            while start < len(ids):  # in pieces, as a prompt may come
                count = min(int(rng.integers(1, 150)), len(ids) - start)
                go_on(made, ids[start : start + count], write=bool(rng.integers(2)))
                start += count
        elif what == 2 and live:
            go_on(seq, rng.integers(0, 9, rng.integers(1, 70)))
        elif what == 3 and live:
            n = int(rng.integers(1, 64))
            go_on(seq, rng.integers(0, 9, n), accepted=[int(rng.integers(0, n + 1))])
        elif what == 4 and live and len(live) < 4:
            p.model[p.cache.fork(seq)] = p.model[seq]
        elif what == 5 and live:
            p.truncate(seq, int(rng.integers(1, len(p.model[seq]) + 1)))
            go_on(seq, rng.integers(0, 9, 1))
        elif what == 6 and live:
            p.cache.remove(seq)
            del p.model[seq]
        elif what == 7 and rng.random() < 0.4:  # a restart
            p.cache.store.flush()
            p.cache.store.close()
            p = opened()
        for long in [x for x, of in p.model.items() if len(of) > 450]:
            p.cache.remove(long)
            del p.model[long]
        p.cache.check()
    assert found > 50
    p.cache.store.close()
