"""Keys by channel in caches of one sequence, against a plain model of what they must hold."""

import copy
import pickle

import numpy as np
import pytest
from channel_model import KEEPS, Sequence, close, shift_tables, turned

import numkv

KINDS = ["int8_channel", "int4_channel_fine", "int4_channel"]
HEADS, Q_HEADS, DIM = 2, 4, 32


def layers(kind, target, **options):
    """Objects of one layer."""
    options |= {"kind": kind, "target": target}
    yield numkv.ContiguousLayer(600, HEADS, DIM, **options)
    yield numkv.PagedLayer(10, 64, HEADS, DIM, **options)
    yield numkv.PagedLayer(5, 128, HEADS, DIM, **options)


def rows(rng, n):
    k, v = rng.standard_normal((2, n, HEADS, DIM)).astype(np.float32)
    k[:, :, 3] += 50
    return k, v


def queries(rng, n):
    q = rng.standard_normal((n, Q_HEADS, DIM)).astype(np.float32)
    q[:, :, 3] /= 50
    return q


class Played:
    """A layer and its model."""

    def __init__(self, layer, kind, rng, to, host, sinks=0, limit=2e-4):
        self.layer, self.rng, self.to, self.host, self.limit = layer, rng, to, host, limit
        self.model = Sequence.empty(HEADS, DIM, kind, sinks)

    def append(self, n, write=False):
        k, v = rows(self.rng, n)
        q = queries(self.rng, n)
        if write:
            qkv = np.concatenate([x.reshape(n, -1) for x in (q, k, v)], axis=1)
            self.layer.write(self.to(qkv), num_q_heads=Q_HEADS, qk_mode=numkv.QKMode.COPY)
        else:
            self.layer.append(self.to(k), self.to(v))
        self.model = self.model.extended(k, v)
        self.look(n)

    def look(self, n=1, window=-1):
        length = len(self.model)
        assert self.layer.seq_len == length
        q = queries(self.rng, n)
        found = self.host(self.layer.decode_attention(self.to(q), window_left=window))
        close(found, self.model.attended(q, range(length - n, length), window), self.limit)
        self.layer.check()

    def truncate(self, length):
        """What is cut out of a group before that of the last append is decoded."""
        self.layer.truncate(length)
        self.model = self.model.truncated(length)


@pytest.mark.parametrize("kind", KINDS)
def test_appends(target, to, host, rng, kind):
    """Prompts in parts, and tokens, over ends of groups; windows."""
    for layer in layers(kind, target):
        p = Played(layer, kind, rng, to, host)
        p.append(100, write=True)
        p.append(1)
        p.append(27)
        p.append(1)
        p.append(130)
        p.look(5, window=70)
        p.append(3, write=True)


@pytest.mark.kernels
def test_appends_on_kernels(target, to, host, rng):
    kind = "int8_channel"
    layer = numkv.ContiguousLayer(150, HEADS, DIM, kind=kind, target=target)
    p = Played(layer, kind, rng, to, host)
    p.append(70)
    p.append(1)


@pytest.mark.parametrize("kind", KINDS)
def test_truncate_and_copies(target, to, host, rng, kind):
    for layer in layers(kind, target):
        p = Played(layer, kind, rng, to, host)
        p.append(150)
        p.append(1)
        p.truncate(140)
        p.look()
        p.truncate(100)  # rows in full are gone
        p.look()
        cut = p.model
        others = [layer.copy(), copy.deepcopy(layer)]
        if target == "cpu":
            others.append(pickle.loads(pickle.dumps(layer)))
        p.append(50)
        p.append(20)
        for other in others:
            again = Played(other, kind, rng, to, host)
            again.model = cut
            again.look()
            again.append(40)
        p.truncate(0)
        p.append(70)


@pytest.mark.parametrize("kind", KINDS)
def test_a_cache_of_several_layers(target, to, host, rng, kind):
    """Growth, reads, and copies of what grows."""
    cache = numkv.KVCache(2, HEADS, DIM, kind=kind, target=target)
    model = Sequence.empty(HEADS, DIM, kind)
    for n in (70, 1, 100, 1):
        k, v = rows(rng, n)
        for layer in range(2):
            cache.append(layer, to(k), to(v))
        cache.advance(n)
        model = model.extended(k, v)
        q = queries(rng, n)
        places = range(len(model) - n, len(model))
        for of in (cache, cache.copy()):
            close(host(of.decode_attention(1, to(q))), model.attended(q, places))
    length = len(model)
    end = (length - 1) // 64 * 64
    of_k, of_v = model.coded()
    np.testing.assert_allclose(host(cache.k(0))[:end], of_k[:end], rtol=1e-6)
    np.testing.assert_array_equal(host(cache.k(0))[end:], model.k[end:])
    np.testing.assert_allclose(host(cache.v(1))[:end], of_v[:end], rtol=1e-6)
    assert cache.quantised_tokens(0) == range(end)
    errors = cache.key_error(0, to(queries(rng, 2)))
    assert errors.shape == (2, Q_HEADS)
    assert (errors > 0).all()


def test_results_do_not_depend_on_how_a_prompt_was_cut(rng):
    k, v = rows(rng, 200)
    q, found = queries(rng, 200), []
    for parts in ([200], [130, 70], [63, 1, 136]):
        layer = numkv.ContiguousLayer(200, HEADS, DIM, kind="int4_channel")
        first, outs = 0, []
        for n in parts:
            part = slice(first, first + n)
            layer.append(k[part], v[part])
            outs.append(layer.decode_attention(q[part]))
            first += n
        found.append(np.concatenate(outs))
    assert layer.capacity == 256
    np.testing.assert_allclose(found[0], found[1], atol=2e-6)
    np.testing.assert_allclose(found[0], found[2], atol=2e-6)


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("kind", "of_rows", "window", "cap"),
    [
        ("int8_channel", "fp32", -1, 0.0),
        ("int8_channel", "fp32", 20, 5.0),
        pytest.param("int4_channel", "bf16", 70, 0.0, marks=pytest.mark.nightly),
        pytest.param("int8_channel", "fp16", -1, 5.0, marks=pytest.mark.nightly),
    ],
)
def test_bound_calls(rng, kind, of_rows, window, cap):
    """As append and attention, bit by bit, over ends of groups; all but the first of a group in one compiled call."""
    dtype = numkv.kind(of_rows).dtype
    sinks = rng.standard_normal(Q_HEADS).astype(np.float32)
    options = {"window_left": window, "logits_soft_cap": cap, "sinks": sinks}
    makers = (
        lambda: numkv.ContiguousLayer(400, HEADS, DIM, kind=kind),
        lambda: numkv.PagedLayer(8, 64, HEADS, DIM, kind=kind),
        lambda: numkv.KVCache(1, HEADS, DIM, kind=kind),
    )
    for make in makers:
        a, b = make(), make()
        bound, ordinary = a.bind(Q_HEADS, of_rows, **options), []
        append_attend = a._append_attend

        def counted(*args, append_attend=append_attend, ordinary=ordinary):
            ordinary.append(1)
            return append_attend(*args)

        a._append_attend = counted
        if isinstance(a, numkv.ContiguousLayer | numkv.PagedLayer):
            bound = a.bind(Q_HEADS, of_rows, **options)
        length = a_first = compiled = 0
        for n in (50, 1, 13, *[1] * 70, 3, 100, *[2] * 40):
            q, k, v = (x.astype(dtype) for x in (queries(rng, n), *rows(rng, n)))
            ordinary.clear()
            if isinstance(a, numkv.KVCache):
                out = bound.begin(n)(0, q, k, v)
                b.append(0, k, v)
                wanted = b.decode_attention(0, q, **options)
                a.advance(n)
                b.advance(n)
            else:
                out = bound(q, k, v)
                b.append(k, v)
                wanted = b.decode_attention(q, **options)
            assert out.tobytes() == wanted.tobytes()
            first, last = length // 64, (length + n - 1) // 64
            another = length % 64 == 0 or first != last or a_first == length
            assert ordinary or not another
            compiled += bool(ordinary) and not another
            if first != last:
                a_first = length + n  # its group lies behind another in the block
            length += n
            a.check()
        assert compiled <= 2  # steps of caps are made when they are first needed
        for which in "kv":
            x, y = ((of.k if which == "k" else of.v) for of in (a, b))
            x, y = (x(0), y(0)) if isinstance(a, numkv.KVCache) else (x, y)
            assert np.array_equal(x, y)


@pytest.mark.parametrize("kind", KINDS)
def test_bound_calls_over_splits(rng, kind):
    """Several workers share a long sequence and merge what they find: the same bits, whatever their number."""
    layers = [numkv.ContiguousLayer(9100, HEADS, DIM, kind=kind) for _ in range(3)]
    first = rows(rng, 3000), rows(rng, 6001)
    bound = [layer.bind(Q_HEADS) for layer in layers[:2]]
    for prompt in first:
        for layer in layers:
            layer.append(*prompt)
        for _ in range(3):
            q, new = queries(rng, 1), rows(rng, 1)
            with numkv.num_threads(2):
                out = bound[0](q, *new)
            with numkv.num_threads(1):
                alone = bound[1](q, *new)
            layers[2].append(*new)
            wanted = layers[2].decode_attention(q)
            assert out.tobytes() == alone.tobytes() == wanted.tobytes()


@pytest.mark.kernels
def test_bound_calls_that_fail(rng):
    """Nothing changes by rows that are not finite, the last of a group too; truncation into and before the group."""
    a, b = (numkv.ContiguousLayer(400, HEADS, DIM, kind="int8_channel") for _ in "ab")
    bound = a.bind(Q_HEADS)

    def step(n):
        q, (k, v) = queries(rng, n), rows(rng, n)
        b.append(k, v)
        np.testing.assert_array_equal(bound(q, k, v), b.decode_attention(q))

    for n in [100, *[1] * 27]:
        step(n)
    q, (k, v) = queries(rng, 1), rows(rng, 1)
    for wrong in (k, v):
        x = wrong[0, 1, 3]
        wrong[0, 1, 3] = np.nan
        with pytest.raises(numkv.NonFiniteInput):
            bound(q, k, v)
        wrong[0, 1, 3] = x
        assert a.seq_len == 127
        a.check()
    step(1)
    other = a.copy()
    for length in (127, 100, 64, 30):
        for of in (a, b):
            of.truncate(length)
        for n in (1, 1, 2):
            step(n)
    assert other.seq_len == 128
    other.check()


@pytest.mark.parametrize("kind", KINDS)
def test_files(target, to, host, rng, kind, tmp_path):
    """At borders of groups, and with a group whose rows in full are gone."""
    for n, cut in (
        (0, 0),
        (1, 1),
        (63, 63),
        (64, 64),
        (65, 65),
        (128, 128),
        (150, 150),
        (200, 150),
        (200, 90),
    ):
        for layer in layers(kind, target):
            p = Played(layer, kind, rng, to, host)
            if n:
                p.append(n)
                p.append(1)
                p.truncate(cut)
            numkv.save(tmp_path / "x", layer)
            again = numkv.load(tmp_path / "x", target=target)
            assert type(again) is type(layer)
            assert again.quantised_tokens == layer.quantised_tokens
            q = Played(again, kind, rng, to, host)
            q.model = p.model
            if cut:
                q.look()
                queries_of = to(queries(rng, 1))
                np.testing.assert_array_equal(
                    host(again.decode_attention(queries_of)),
                    host(layer.decode_attention(queries_of)),
                )
            q.append(1)
            q.append(70)


def test_files_of_several_layers(rng, tmp_path):
    cache = numkv.KVCache(2, HEADS, DIM, k_kind="int4_channel", v_kind="bf16")
    for n in (100, 40):
        for layer in range(2):
            cache.append(layer, *rows(rng, n))
        cache.advance(n)
    cache.append(0, *rows(rng, 30))  # ahead of the other
    numkv.save(tmp_path / "x", cache)
    again = numkv.load(tmp_path / "x")
    again.check()
    q = queries(rng, 2)
    for layer in range(2):
        np.testing.assert_array_equal(
            again.decode_attention(layer, q), cache.decode_attention(layer, q)
        )
        np.testing.assert_array_equal(again.k(layer), cache.k(layer))


@pytest.mark.parametrize("kind", KINDS)
def test_attention_weights(target, to, host, rng, kind):
    """Queries of several groups read the same token in full and as codes."""
    for layer in layers(kind, target):
        p = Played(layer, kind, rng, to, host)
        for n in (1, 149, 1):
            p.append(n)
            for window in (-1, 70):
                q = queries(rng, n)
                found = host(layer.attention_weights(to(q), window_left=window))
                np.testing.assert_allclose(found, p.model.mass(q, window), atol=2e-4)
        p.truncate(100)
        q = queries(rng, 3)
        np.testing.assert_allclose(host(layer.attention_weights(to(q))), p.model.mass(q), atol=2e-4)


@pytest.mark.parametrize("shifts", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_compaction(target, to, host, rng, kind, shifts):
    """Whole groups before the first token that moves stay; rows of others are as they were read; and it goes on."""
    shift = numkv.rope_shift(*shift_tables(DIM)) if shifts else None
    limit = 2e-4
    if shifts:  # in float32, so that a code may be its neighbour
        limit = 2e-3 if kind == "int8_channel" else 2e-2
    for n, cut, some in ((200, 200, 3), (192, 192, 1), (40, 40, 1), (200, 150, 1)):
        for keep in KEEPS.values():
            for layer in [*layers(kind, target)][-some:]:
                p = Played(layer, kind, rng, to, host, limit=limit)
                p.append(n - 1)
                p.append(1)
                p.truncate(cut)
                kept = list(keep(cut))
                layer.compact(kept, shift)
                p.model = p.model.compacted(kept, turned if shifts else None)
                if kept:
                    p.look()
                p.append(70)


@pytest.mark.parametrize("bound", [20, 64, 130])
def test_the_audit_of_a_bounded_cache_counts_whole_groups(bound, rng, tmp_path):
    cache = numkv.KVCache(1, HEADS, DIM, kind="int8_channel", max_seq_len=bound)
    cache.check()
    cache.append(0, *rows(rng, bound))
    cache.advance(bound)
    numkv.save(tmp_path / "x.numkv", cache)
    for one in (cache, cache.copy(), numkv.load(tmp_path / "x.numkv")):
        one.check()
        with pytest.raises(numkv.CacheFull):
            one.append(0, *rows(rng, 1))


@pytest.mark.parametrize("kind", KINDS)
def test_compaction_moves_codes_of_v_bit_for_bit(rng, kind):
    cache = numkv.KVCache(2, HEADS, DIM, k_kind=kind, v_kind="fp8_e4m3")
    for layer in range(2):
        cache.set_scales(layer, v=np.float32([0.5 + layer, 2.0]))
        cache.append(layer, *rows(rng, 200))
    cache.advance(200)
    kept = np.stack([np.arange(0, 200, 2), np.arange(100, 200)])
    before = [cache.v(layer)[kept[layer]] for layer in range(2)]
    cache.compact(kept)
    for layer, wanted in enumerate(before):
        np.testing.assert_array_equal(cache.v(layer)[:64], wanted[:64])
    cache.check()


def test_a_compaction_that_is_refused_changes_nothing(rng):
    layer = numkv.ContiguousLayer(400, HEADS, DIM, kind="int8_channel")
    layer.append(*rows(rng, 200))
    q = queries(rng, 3)
    before = layer.decode_attention(q)
    with pytest.raises(IndexError, match="rope_shift's tables"):
        layer.compact([0, 199], numkv.rope_shift(*shift_tables(DIM, 100)))
    with pytest.raises(TypeError, match="`shift`"):
        layer.compact([0, 199], lambda *_: None)
    layer.check()
    np.testing.assert_array_equal(layer.decode_attention(q), before)


@pytest.mark.parametrize("kind", KINDS)
def test_first_tokens_in_full(target, to, host, rng, kind, tmp_path):
    """For good: through prompts, truncations, compactions, copies and files; also more of them than a group has."""
    for sinks in (4, 70):
        full = numkv.FullPrecision(window=32, num_sink_tokens=sinks)
        for layer in layers(kind, target, full_precision=full):
            p = Played(layer, kind, rng, to, host, sinks)
            for n in (3, 100, 1):
                p.append(n)
                p.look(2, window=90)
            q = queries(rng, 3)
            found = host(layer.attention_weights(to(q)))
            np.testing.assert_allclose(found, p.model.mass(q), atol=2e-4)
            for cut in (90, 60, 2):
                p.truncate(cut)
                p.look()
                numkv.save(tmp_path / "x", layer)
                loaded = numkv.load(tmp_path / "x", target=target)
                assert loaded.quantised_tokens == layer.quantised_tokens
                for other in (layer.copy(), loaded):
                    again = Played(other, kind, rng, to, host, sinks)
                    again.model = p.model
                    again.look()
                    again.append(70)
                    again.append(1)
            p.append(149)
            p.append(1)
            for kept in (range(100), [0, 1, *range(80, 140)], range(50, 62)):
                layer.compact(kept)
                p.model = p.model.compacted(kept)
                p.look()
                p.append(80)
                p.append(1)


def test_what_is_refused(rng):
    layer = numkv.ContiguousLayer(100, HEADS, DIM, kind="int8_channel")
    cache = numkv.KVCache(1, HEADS, DIM, k_kind="int4_channel", v_kind="int8")
    layer.append(*rows(rng, 70))
    cache.append(0, *rows(rng, 70))
    cache.advance(70)
    full = numkv.FullPrecision(window=65)
    for call, said in (
        (lambda: layer.jit, r"`jit`: .*int8_channel"),
        (lambda: cache.arrays(0), r"`arrays`: .*int4_channel"),
        (lambda: cache.k_scales(0), "k_scales: .*one by one"),
        (
            lambda: numkv.KVCache(1, HEADS, DIM, kind="int8_channel", full_precision=full),
            "`full_precision`: expected a window of at most 64 tokens",
        ),
        (
            lambda: numkv.KVCache(1, HEADS, DIM, kind="int8_channel", rotate=True),
            "`rotate`: .*channels",
        ),
        (lambda: numkv.PagedLayer(4, 16, HEADS, DIM, kind="int8_channel"), "multiple of 64"),
    ):
        with pytest.raises(numkv.NumkvError, match=said):
            call()
