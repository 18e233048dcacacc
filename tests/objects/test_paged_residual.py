"""A `PagedKVCache` that keeps newest and first tokens in full precision beside codes."""

import copy
import pickle
import zlib

import naive
import naive_sparse
import numpy as np
import pytest
import tolerances
from layer_lists import in_full, paged_kv_cache, specs

import numkv
from numkv.caches.paged.groups import groups_of
from numkv.caches.paged.layers import Layers

HEADS, DIM, SIZE, NEWEST, FIRST = 2, 8, 4, 6, 3
KEPT = numkv.FullPrecision(NEWEST, FIRST)
WINDOWS = [-1, 9, -1, -1]  # the last layer reads the first one's rows
SHARES = {3: 0}
F32 = np.float32


def make(*, num_blocks=160, **options):
    options = {
        "kind": "int8", "windows": WINDOWS, "shares": SHARES, "block_size": SIZE, "full_precision": KEPT,
    } | options  # fmt: skip
    return paged_kv_cache(len(options["windows"]), HEADS, DIM, num_blocks=num_blocks, **options)


def rows(layer, text):
    """K and V ``(2, heads, dim)`` of the last token of a text."""
    seed = zlib.crc32(repr((layer, list(map(int, text)))).encode())
    return np.random.default_rng(seed).standard_normal((2, HEADS, DIM), F32)


def queries(n, layer=0):
    return np.random.default_rng([n, layer]).standard_normal((n, 2 * HEADS, DIM), F32)


class Plain:
    """Texts, rows, and from which token on a sequence still has rows in full."""

    def __init__(self, kind="int8", full="fp32", windows=WINDOWS):
        self.kind, self.full, self.windows = kind, full, windows
        self.texts, self.rows, self.begins, self.released = {}, {}, {}, {}

    def add(self, seq, text=()):
        self.texts[seq], self.rows[seq], self.begins[seq], self.released[seq] = [], [], [0, 0], 0
        self.grow(seq, text)
        # A prefix brings what is in full where its last full block ends.
        self.released[seq] = max(0, len(text) // SIZE * SIZE - NEWEST) // SIZE

    def grow(self, seq, text):
        for token in text:
            self.texts[seq].append(token)
            layers = range(len(self.windows))
            self.rows[seq].append([rows(SHARES.get(n, n), self.texts[seq]) for n in layers])
        gone = max(0, len(self.texts[seq]) - NEWEST) // SIZE
        self.released[seq] = max(self.released[seq], gone)

    def truncate(self, seq, length):
        # Of layers without a window, which keep the blocks of the first tokens, and of those with one.
        kept = -(-FIRST // SIZE), 0
        first = [self.released[seq] * SIZE * (self.released[seq] > n) for n in kept]
        self.begins[seq] = [min(max(x), length) for x in zip(self.begins[seq], first, strict=True)]
        self.released[seq] = 0  # the last block comes again, with other tokens
        del self.texts[seq][length:], self.rows[seq][length:]

    def keep(self, seq, kept):
        """Drop all tokens but these."""
        for of in (self.rows, self.texts):
            of[seq] = [of[seq][i] for i in kept]
        self.released[seq] = max(0, len(kept) - NEWEST) // SIZE

    def fork(self, old, new):
        for of in (self.texts, self.rows, self.begins, self.released):
            of[new] = copy.copy(of[old])

    def newest(self, seq, layer, position):
        """The first of the newest tokens that a query reads in full."""
        return max(self.begins[seq][self.windows[layer] >= 0], position + 1 - NEWEST)

    def read(self, seq, layer, position):
        """K and V as a query reads them, and as codes."""
        token = np.arange(position + 1)
        full = token >= self.newest(seq, layer, position)
        if self.windows[layer] < 0:
            full |= token < FIRST
        x = np.stack([of[layer] for of in self.rows[seq][: position + 1]])
        codes = naive.dequantise(*naive.quantise(x, self.kind))
        return np.where(full[:, None, None, None], naive.round_to(x, self.full), codes), codes

    def attended(self, seq, layer, q, position):
        window = self.windows[layer]
        low = 0 if window < 0 else max(0, position - window)
        x = self.read(seq, layer, position)[0][low:]
        k, v = (x[:, i].swapaxes(0, 1)[None] for i in (0, 1))
        return [naive.attention(q[None], k, of_v, [len(x)])[0][0] for of_v in (v, np.abs(v))]

    def attended_sparsely(self, seq, layer, q, position, most):
        x, codes = self.read(seq, layer, position)
        coded = codes[: max(FIRST, self.newest(seq, layer, position)), 0], min(FIRST, len(x))
        k, v = x[:, 0], x[:, 1]
        return [
            naive_sparse.attention(q, k, of_v, SIZE, most, coded=coded)[0]
            for of_v in (v, np.abs(v))
        ]

    def same(self, found, seq, layer, q, position, most=None):
        """Attention, if given of `most` blocks alone."""
        if most is None:
            want, summed = self.attended(seq, layer, q, position)
        else:
            want, summed = self.attended_sparsely(seq, layer, q, position, most)
        bound = tolerances.attention(self.kind, "fp32")
        tolerances.assert_rows_close(found, want, bound, summed)


def grow(cache, plain, seqs, texts, to=np.asarray, host=np.asarray, *, accepted=None, named=True):
    step = cache.reserve(seqs, [len(text) for text in texts])
    layers = range(cache.num_layers)
    new = {}
    for seq, text in zip(seqs, texts, strict=True):
        own = [
            rows(SHARES.get(n, n), plain.texts[seq] + text[: i + 1])
            for i in range(len(text))
            for n in layers
        ]
        new[seq] = np.array(own, F32).reshape(len(text), len(layers), 2, HEADS, DIM)
    every = np.concatenate([new[seq] for seq in seqs])
    outs, most, sparse = [], 2 + len(plain.texts[seqs[0]]) % 3, []
    for layer in layers:
        if layer not in SHARES:
            step.append(layer, *(to(np.ascontiguousarray(every[:, layer, i])) for i in (0, 1)))
        q = to(queries(step.num_tokens, layer))
        outs.append(host(step.attention(layer, q)))
        if cache.layers[0].key_bounds:
            sparse.append(host(step.sparse_attention(layer, q, most_blocks=most)))
    ids = [token for text in texts for token in text]
    cache.commit(step, accepted, token_ids=ids if named else None)
    at = 0
    for i, (seq, text) in enumerate(zip(seqs, texts, strict=True)):
        begin, took = len(plain.texts[seq]), len(text) if accepted is None else accepted[i]
        for n, token in enumerate(text[:took]):
            plain.texts[seq].append(token)
            plain.rows[seq].append(list(new[seq][n]))
        for n in range(took):
            for layer in layers:
                q = queries(step.num_tokens, layer)[at + n]
                plain.same(outs[layer][at + n], seq, layer, q, begin + n)
                if sparse:
                    plain.same(sparse[layer][at + n], seq, layer, q, begin + n, most)
        plain.grow(seq, [])
        at += len(text)


def check(cache, plain, to=np.asarray, host=np.asarray):
    cache.check()
    seqs = [seq for seq in cache.sequences if cache.length(seq)]
    assert {seq: cache.length(seq) for seq in cache.sequences} == {
        seq: len(plain.texts[seq]) for seq in cache.sequences
    }
    for layer in range(cache.num_layers if seqs else 0):
        q = queries(len(seqs), layer)
        out = host(cache.decode_attention(layer, seqs, to(q)))
        for i, seq in enumerate(seqs):
            plain.same(out[i], seq, layer, q[i], len(plain.texts[seq]) - 1)


@pytest.mark.parametrize(("kind", "full"), [("int8", "fp32"), ("int4", "bf16")])
def test_a_prompt_a_fork_a_second_prompt_and_a_cut(target, to, host, kind, full):
    cache, plain = (
        make(target=target, kind=kind, full_precision=in_full(NEWEST, FIRST, full)),
        Plain(kind, full),
    )
    first = cache.add()
    plain.add(first)
    grow(cache, plain, [first], [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9]], to, host)
    second = cache.add([3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 7])
    assert cache.cached_len(second) in (8, 11)  # whether the last block is found in part, too
    plain.add(second, [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5][: cache.length(second)])
    third = cache.fork(first)
    plain.fork(first, third)
    # Rows in full of tokens 4 are there, of none before but the first ones.
    cache.truncate(third, 5)
    plain.truncate(third, 5)
    grow(cache, plain, [third, second, first], [[7], [2, 7], [7]], to, host, accepted=[1, 1, 1])
    check(cache, plain, to, host)


@pytest.mark.parametrize("windows", [WINDOWS, [-1] * 4])
def test_any_calls_in_any_order(windows):
    rng = np.random.default_rng(5)
    bounds = {"key_bounds": windows != WINDOWS}  # which a window has no use for
    cache, plain = make(num_blocks=44, windows=windows, **bounds), Plain(windows=windows)
    full = lost = found = 0
    for turn in range(80):
        seqs = list(cache.sequences)
        action = rng.choice(
            ["add", "grow", "grow", "grow", "fork", "cut", "remove", "swap", "copy"]
        )
        one = int(rng.choice(seqs)) if seqs else None
        if action == "add" or one is None:
            text = rng.integers(0, 5, rng.integers(0, 9)).tolist()
            if one is not None:
                text = plain.texts[one][: rng.integers(6, 30)] + text
            seq = cache.add(text)
            plain.add(seq, text[: cache.cached_len(seq)])
            found += cache.cached_len(seq) > NEWEST
        elif action == "grow":
            some = [int(s) for s in rng.permutation(seqs)[: rng.integers(1, 4)]]
            texts = [rng.integers(0, 5, rng.integers(0, 9)).tolist() for _ in some]
            accepted = [int(rng.integers(0, len(t) + 1)) for t in texts]
            try:
                grow(cache, plain, some, texts, accepted=accepted, named=bool(rng.integers(4)))
            except numkv.CacheFull:
                full += 1
                cache.remove(one)
        elif action == "fork":
            plain.fork(one, cache.fork(one))
        elif action == "cut":
            length = int(rng.integers(0, cache.length(one) + 1))
            try:
                cache.truncate(one, length)
                plain.truncate(one, length)
                lost += plain.begins[one][0] > max(0, length - NEWEST)
            except numkv.NotSupported:  # of the window of layer 1, never of what is in full
                assert windows == WINDOWS
        elif action == "remove":
            cache.remove(one)
        elif action == "swap":
            swapped = cache.swap_out(one)
            cache.remove(one)
            try:
                plain.fork(one, cache.swap_in(swapped))
            except numkv.CacheFull:
                full += 1
        else:
            cache = cache.copy()
        if turn % 5 == 0:
            check(cache, plain)
    check(cache, plain)
    assert full > 0
    assert lost > 0 or windows == WINDOWS
    assert found > 0


def test_a_cut_far_back_leaves_codes():
    """Windows of a model refuse to go back; what is in full precision does not."""
    cache, plain = make(windows=[-1] * 4), Plain(windows=[-1] * 4)
    seq = cache.add()
    plain.add(seq)
    grow(cache, plain, [seq], [list(range(30))])
    for length, text in ((13, [7]), (12, [1, 2]), (9, [5] * 12), (2, [4, 4, 4]), (0, [1])):
        cache.truncate(seq, length)
        plain.truncate(seq, length)
        check(cache, plain)
        again = cache.swap_in(cache.swap_out(seq))
        plain.fork(seq, again)
        grow(cache, plain, [seq, again], [text, text])
        check(cache, plain)
        cache.remove(again)
    # A block that has not all its rows in full is found by nobody.
    other = cache.add([*plain.texts[seq], 9, 9])
    plain.add(other, plain.texts[seq][: cache.length(other)])
    check(cache, plain)


def test_copies_pickles_and_files(tmp_path, capsys):
    cache, plain = make(), Plain()
    seqs = [cache.add(), cache.add()]
    for seq in seqs:
        plain.add(seq)
    grow(cache, plain, seqs, [list(range(17)), [7, 7]])
    cache.truncate(seqs[0], 15)
    plain.truncate(seqs[0], 15)
    seqs.append(cache.fork(seqs[0]))
    plain.fork(*seqs[::2])
    numkv.save(tmp_path / "cache", cache)
    numkv.save(tmp_path / "sequences", [cache.swap_out(seq) for seq in seqs])
    others = [make()]
    for one in numkv.load(tmp_path / "sequences"):
        others[0].swap_in(one)
    others += [numkv.load(tmp_path / "cache"), copy.copy(cache), pickle.loads(pickle.dumps(cache))]
    q = queries(3)
    want = cache.decode_attention(0, seqs, q)
    for other in others:
        assert other.layers == cache.layers
        assert other.decode_attention(0, other.sequences, q).tobytes() == want.tobytes()
        own = copy.deepcopy(plain)
        grow(other, own, [other.sequences[0]], [[1, 2]])
        check(other, own)
    for wrong in (
        in_full(5, FIRST),
        in_full(NEWEST),
        in_full(NEWEST, FIRST, "bf16"),
    ):
        with pytest.raises(numkv.DimensionMismatch, match="geometry"):
            make(full_precision=wrong).swap_in(cache.swap_out(0))
    assert "FullPrecision(window=6, num_sink_tokens=3, kind=fp32)" in repr(cache)
    numkv.show(cache)
    assert "in full 10 12-13" in capsys.readouterr().out


def test_blocks_are_given_back_and_bytes_are_few():
    cache, plain = make(windows=[-1] * 3, shares=None, full_precision=in_full(NEWEST, 1)), Plain()
    seq = cache.add()
    plain.add(seq)
    for begin in range(0, 40, 8):
        step = cache.reserve([seq], 8)
        for layer in range(3):
            x = np.full((8, HEADS, DIM), begin, F32)
            step.append(layer, x, x)
        cache.commit(step)
    tables = cache._sequences[seq].tables
    of_full = [t for t, g in zip(tables, cache._groups, strict=True) if g.beside]
    assert [(t >= 0).sum() for t in of_full] == [3] * len(of_full)  # tokens 34 to 39, and the first
    less = paged_kv_cache(
        3, HEADS, DIM, max_nbytes=60_000, kind="int8", full_precision=numkv.FullPrecision(4)
    )
    assert less.nbytes <= 60_000
    more = paged_kv_cache(
        3, HEADS, DIM, num_blocks=less.num_blocks + 1, kind="int8", full_precision=in_full(4)
    )
    assert more.nbytes > 60_000
    # Codes, which are there of all tokens, waste nothing, whatever else has to fit.
    layers = Layers.of(specs(32, 8, 128, kind="int4", full_precision=in_full(128, 4)))
    groups = groups_of(layers, 16)
    assert [len(g.layers) for g in groups if not g.beside] == [32]


def test_a_result_does_not_depend_on_the_batch(target, to, host):
    cache, plain = make(target=target, num_blocks=64), Plain()
    seqs = [cache.add(), cache.add()]
    for seq in seqs:
        plain.add(seq)
    grow(cache, plain, seqs, [[1, 2], list(range(14))], to, host)
    q = queries(2)
    for layer in range(3):
        both = host(cache.decode_attention(layer, seqs, to(q)))
        for i, seq in enumerate(seqs):
            one = host(cache.decode_attention(layer, [seq], to(q[i : i + 1])))
            assert one.tobytes() == both[i : i + 1].tobytes()
    half = q.astype(np.float16)
    out = host(cache.decode_attention(0, seqs, to(half)))
    assert out.dtype == np.float16
    want = host(cache.decode_attention(0, seqs, to(half.astype(F32))))
    assert np.array_equal(out, want.astype(np.float16))


def test_options_of_attention():
    """Ranges, no causality, the lse, sinks of the softmax and an array for the output."""
    cache, plain = make(), Plain()
    seq = cache.add()
    plain.add(seq)
    grow(cache, plain, [seq], [list(range(11))])
    text, new = plain.texts[seq], [20, 21, 22]
    step = cache.reserve([seq], 3)
    own = np.stack([rows(0, text + new[: i + 1]) for i in range(3)])
    step.append(0, own[:, 0], own[:, 1])
    plain.texts[seq] = text + new
    plain.rows[seq] += [[x] * 4 for x in own]
    q, sinks = queries(3), np.array([0.5, -1, 2, 0], F32)
    ranges = np.array([[0, 14], [2, 9], [5, 5]], np.int64)
    out = np.full_like(q, 7)
    found, lse = step.attention(0, q, ranges=ranges, return_lse=True, out=out, sinks=sinks)
    assert found is out
    for i, (low, high) in enumerate(ranges):
        token = np.arange(low, high)
        full = (token >= 11 + i + 1 - NEWEST) | (token < FIRST)
        x = np.stack([of[0] for of in plain.rows[seq]])[low:high]
        x = np.where(full[:, None, None, None], x, naive.dequantise(*naive.quantise(x, "int8")))
        k, v = (x[:, j].swapaxes(0, 1)[None] for j in (0, 1))
        want, logs = naive.attention(q[i][None], k, v, [len(x)], sinks=sinks)
        tolerances.assert_rows_close(out[i], want[0], tolerances.attention("int8", "fp32"))
        tolerances.assert_lse_close(lse[i], logs[0])
    whole = step.attention(0, q[:3], causal=False)
    again = step.attention(0, q, ranges=np.array([[0, 14]] * 3, np.int64))
    assert whole.tobytes() == again.tobytes()


@pytest.mark.parametrize("rotate", [False, True])
def test_a_fused_write_is_an_append(target, to, host, rotate):
    caches = [
        make(windows=[-1], shares=None, target=target, rotate=rotate, num_blocks=24) for _ in "ab"
    ]
    rng = np.random.default_rng(5)
    angles = np.arange(12)[:, None] * [1.0, 0.3, 0.1, 0.01]
    cos, sin = (f(angles).astype(F32) for f in (np.cos, np.sin))
    qkv = rng.standard_normal((11, 8 * DIM), F32)
    steps = [cache.reserve([cache.add()], 11) for cache in caches]
    q = host(
        steps[0].write(
            0, to(qkv), num_q_heads=4, cos=to(cos), sin=to(sin), qk_mode=numkv.QKMode.HALF_SPLIT
        )
    )
    heads = qkv.reshape(11, 8, DIM).astype(np.float64)
    turned = np.stack([naive.rope(heads[t, :6], cos[t], sin[t], False) for t in range(11)])
    tolerances.assert_rows_close(q, turned[:, :4], 1e-5)
    steps[1].append(
        0, to(turned[:, 4:].astype(F32)), to(np.ascontiguousarray(qkv.reshape(11, 8, DIM)[:, 6:]))
    )
    outs = [host(step.attention(0, to(q))) for step in steps]
    tolerances.assert_rows_close(outs[0], outs[1], tolerances.attention("int8", "fp32"))


def test_compaction_keeps_first_and_newest_tokens():
    cache, plain = make(windows=[-1] * 4), Plain(windows=[-1] * 4)
    for kept in (
        [0, 1, 2, 3, *range(9, 25)], [0, 1, 2, *range(17, 25)], [0, 1, 2, 8, *range(19, 25)], list(range(22)),
    ):  # fmt: skip
        seq = cache.add()
        plain.add(seq)
        grow(cache, plain, [seq], [list(range(25))])
        other = cache.fork(seq)
        plain.fork(seq, other)
        if kept[-1] != 24:
            with pytest.raises(numkv.NotSupported, match="newest 6 tokens"):
                cache.compact(seq, [0, 1, 2, 8, 9, 10, 11])
            continue
        with pytest.raises(numkv.NotSupported, match="keep tokens 0 to 2"):
            cache.compact(seq, range(5, 25))
        cache.compact(seq, kept)
        plain.keep(seq, kept)
        check(cache, plain)
        grow(cache, plain, [seq, other], [[1, 2, 3], [4]])
        check(cache, plain)


@pytest.mark.parametrize("length", [8, 5, 4, 2])
@pytest.mark.parametrize("forked", [False, True])
def test_a_cut_after_a_compaction_finds_rows_in_full_beside_first_tokens(length, forked):
    """The first block has tokens 0 to 2 for good; that of token 3 moved into it."""
    cache, plain = make(windows=[-1] * 4), Plain(windows=[-1] * 4)
    seq = cache.add()
    plain.add(seq)
    grow(cache, plain, [seq], [list(range(11))])
    if forked:
        plain.fork(seq, cache.fork(seq))
    kept = [0, 1, 2, *range(4, 11)]
    cache.compact(seq, kept)
    plain.keep(seq, kept)
    check(cache, plain)
    cache.truncate(seq, length)
    plain.truncate(seq, length)
    check(cache, plain)
    grow(cache, plain, [seq], [[1, 2, 3]])
    check(cache, plain)


def test_a_prefix_whose_rows_in_full_are_gone_is_taken_over_no_further():
    cache, plain = make(num_blocks=34, windows=[-1], shares=None), Plain(windows=[-1])
    text = list(range(33))
    seq = cache.add()
    plain.add(seq)
    for i in range(0, 33, 3):
        grow(cache, plain, [seq], [text[i : i + 3]])
    # Every length is there while nothing is evicted: what lies in the window then, and the first tokens.
    for length in (33, 21, 9):
        other = cache.add([*text[:length], 99])
        assert cache.cached_len(other) >= length // SIZE * SIZE - SIZE * (length == 33)
        plain.add(other, text[: cache.length(other)])
        check(cache, plain)
        cache.remove(other)
    # What was released is evicted, the first ones first.
    fresh = cache.blocks.allocate(cache.num_free - 2)
    other = cache.add([*text[:21], 99])
    assert cache.cached_len(other) < 20
    plain.add(other, text[: cache.length(other)])
    check_one = cache.length(other)
    assert check_one == 0 or cache.decode_attention(0, [other], queries(1)).shape == (1, 4, DIM)
    cache.blocks.release(fresh)


def test_no_row_of_another_token_leaks():
    """NaN in a token that a window has let go, and in rows of another sequence."""
    cache = make(windows=[-1], shares=None, k_kind="fp32", v_kind="int8")
    seqs = [cache.add(), cache.add()]
    step = cache.reserve(seqs, [2, 9])
    x = np.ones((11, HEADS, DIM), F32)
    k = x.copy()
    k[:2] = np.nan
    step.append(0, k, x, check_finite=False)
    out = step.attention(0, queries(11))
    assert np.isnan(out[:2]).all()
    assert np.isfinite(out[2:]).all()


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"kind": "bf16"}, numkv.NotSupported, "quantises nothing"),
        (
            {"kind": "bf16", "full_precision": in_full(0, FIRST)},
            numkv.NotSupported,
            "`full_precision`",
        ),
        ({"full_precision": 3}, TypeError, "full_precision"),
        ({"windows": [-1, 4, 4, -1], "chunks": [8, None, None, 8]}, numkv.NotSupported, "chunks"),
        (
            {"windows": [4] * 4, "full_precision": in_full(0, FIRST)},
            numkv.NotSupported,
            "newest tokens only",
        ),
        ({"v_kind": "latent", "head_dim_v": 4, "shares": None}, numkv.NotSupported, "latents"),
    ],
)
def test_odd_arguments(options, error, words):
    with pytest.raises(error, match=words):
        make(**options)


def test_a_step_of_no_sequences():
    cache = make()
    step = cache.reserve([], [])
    x = np.zeros((0, HEADS, DIM), F32)
    step.append(0, x, x)
    assert step.attention(0, queries(0)).shape == (0, 2 * HEADS, DIM)
    cache.commit(step)
    cache.check()


def test_attention_weights(rng):
    """Of values that are exact, weighted sums are the output: in full, as codes and first tokens alike."""
    kept = numkv.FullPrecision(16, 4, kind="fp32")
    layers = [numkv.LayerSpec(HEADS, DIM, kind="int4", v_kind="fp32", full_precision=kept)] * 2
    cache = numkv.PagedKVCache(layers=layers, num_blocks=64, block_size=8)
    seq = cache.add()
    v, q = np.zeros((0, HEADS, DIM), F32), None
    for n in (50, 1, 30):
        k, of_v = rng.standard_normal((2, n, HEADS, DIM), F32)
        v, q = np.concatenate([v, of_v]), queries(n)
        step = cache.reserve([seq], n)
        for layer in range(2):
            step.append(layer, k, of_v)
            out = step.attention(layer, q)
            weights = step.attention_weights(layer, q)[0]
            wanted = out.reshape(n, HEADS, -1, DIM).sum((0, 2))
            np.testing.assert_allclose(np.einsum("ht,thd->hd", weights, v), wanted, atol=1e-3)
        cache.commit(step)
    newest = cache.decode_attention(0, [seq], q[-1:])[0].reshape(HEADS, -1, DIM).sum(1)
    weights = cache.attention_weights(0, seq, q[-1:])
    np.testing.assert_allclose(np.einsum("ht,thd->hd", weights, v), newest, atol=1e-3)


def test_what_is_not_built_is_refused(tmp_path):
    cache = make()
    seq = cache.add()
    plain = Plain()
    plain.add(seq)
    grow(cache, plain, [seq], [[1, 2, 3]])
    step = cache.reserve([seq], 2)
    calls = [
        lambda: cache.bind(4),
        lambda: cache.step_buffers(1),
        lambda: cache.reserve([cache.add()], 2, parents=[-1, 0]),
        lambda: step.mark_written(),
        lambda: make(store=numkv.store.PrefixStore(tmp_path / "store", mark="m")),
    ]
    for call in calls:
        with pytest.raises(numkv.NotSupported, match="full precision, got one with FullPrecision"):
            call()
    x = np.zeros((2, HEADS, DIM), F32)
    step.append(0, x, x)
    for option in (
        {"shared_len": 2},
        {"mask": np.ones((2, 1), np.uint32)},
        {"alibi_slopes": np.ones(4, F32)},
    ):
        with pytest.raises(numkv.NotSupported, match="full precision"):
            step.attention(0, queries(2), **option)
    with pytest.raises(numkv.NumkvError, match="layer 1"):
        step.attention(1, queries(2))
    with pytest.raises(IndexError, match="layer"):
        step.append(4, x, x)  # twins of layers are nobody's
    with pytest.raises(numkv.NonFiniteInput):
        step.append(1, x * np.nan, x)
    assert step.unwritten_layers == [1, 2]
    cache.rollback(step)
    cache.remove(cache.sequences[-1])
    check(cache, plain)
