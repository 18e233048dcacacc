"""`PagedKVCache`: groups and blocks, steps, prefixes, forks, truncation, windows, pins and swapping."""

import zlib

import naive
import numpy as np
import pytest
import tolerances

import numkv
from numkv.caches.paged.prefix_match import release_behind_window

HEADS, Q_HEADS, DIM = 2, 4, 8
KINDS = ["fp32", "fp16", "bf16", "int8", "int4"]


def make(layers=2, *, num_blocks=32, block_size=2, kind="fp32", **options):
    return numkv.PagedKVCache(
        layers, HEADS, DIM, num_blocks=num_blocks, block_size=block_size, kind=kind, **options
    )


def rows(layer, tokens, begin=0, salt=0):
    """``(2, n, heads, dim)``: K and V of tokens from `begin` on, which depend on all tokens before them."""
    found = [
        np.random.default_rng(
            zlib.crc32(repr((layer, salt, list(map(int, tokens[: i + 1])))).encode())
        ).standard_normal((2, HEADS, DIM), np.float32)
        for i in range(begin, len(tokens))
    ]
    return np.stack(found, 1) if found else np.empty((2, 0, HEADS, DIM), np.float32)


def write(step, to, texts, starts, salt=0):
    """All layers' rows of a step in which each sequence's text grows from `starts` on."""
    for layer in range(step._store.num_layers):
        parts = [rows(layer, t, n, salt) for t, n in zip(texts, starts, strict=True)]
        parts.append(rows(layer, []))  # a step may be empty
        step.append(layer, *(to(np.ascontiguousarray(x)) for x in np.concatenate(parts, 1)))


def grow(cache, to, seq, text, *, named=True, salt=0):
    """Let a sequence's text become `text`, which begins as it does now."""
    begin = cache.length(seq)
    step = cache.reserve([seq], [len(text) - begin])
    write(step, to, [text], [begin], salt)
    cache.commit(step, token_ids=text[begin:] if named else None)


def fill(cache, seqs, n):
    """Let sequences grow by tokens of which nobody asks what they are."""
    step = cache.reserve(seqs, n)
    for layer in range(cache.num_layers):
        pool, _ = cache._store.place(layer)
        shape = (step.num_tokens, pool.k.shape[1])
        zeros = (np.zeros((*shape, dim), np.float32) for dim in (pool.head_dim, pool.head_dim_v))
        step.append(layer, *map(cache._target.asarray, zeros))
    cache.commit(step)


def started(cache, to, text, *, extra=None, **options):
    seq = cache.add(text, extra=extra)
    grow(cache, to, seq, text, **options)
    return seq


def queries(n):
    return np.random.default_rng(n).standard_normal((n, Q_HEADS, DIM), np.float32)


def outputs(cache, to, host, seqs):
    q = to(queries(1).repeat(len(seqs), 0))
    return np.stack([host(cache.decode_attention(n, seqs, q)) for n in range(cache.num_layers)])


def check_attention(cache, to, host, seq, text, salt=0, kind="fp32"):
    """A sequence attends as if it were alone in the world."""
    assert cache.length(seq) == len(text)
    for layer, out in enumerate(outputs(cache, to, host, [seq])):
        x = rows(layer, text, salt=salt)
        if kind in naive.CODES:
            x = naive.dequantise(*naive.quantise(x, kind))
        else:
            x = naive.round_to(x, kind)
        k, v = x.transpose(0, 2, 1, 3)[:, None]
        want, _ = naive.attention(queries(1), k, v, [len(text)], window_left=cache.window_of(layer))
        tolerances.assert_rows_close(out, want, tolerances.attention(kind, "fp32"))


def state_of(cache):
    """Everything that a refused call leaves as it was."""
    states = [
        (seq, s.length, [t.tolist() for t in s.tables], s.tokens.tolist(), s.registered, s.reserved)
        for seq, s in cache._sequences.items()
    ]
    buffers = [x.tobytes() for pool in cache._pools for x in pool.to_host()]
    return states, buffers, cache.blocks._state.tobytes(), cache.stats(), cache._next


def refused(cache, error, match, call, *args, **options):
    before = state_of(cache)
    with pytest.raises(error, match=match):
        call(*args, **options)
    assert state_of(cache) == before
    cache.check()


@pytest.fixture
def cpu():
    """`to` and `host` of tests that are about the host's bookkeeping."""
    return np.asarray, np.asarray


# -- groups


@pytest.mark.parametrize(
    ("windows", "groups"),
    [
        (None, [(-1, [0, 1, 2, 3])]),
        ([-1, 5, -1, 5], [(-1, [0, 2]), (5, [1, 3])]),
        ([5, 5, 5, -1], [(-1, [3]), (5, [0]), (5, [1]), (5, [2])]),
        ([0, 2, 0, 2], [(0, [0, 2]), (2, [1, 3])]),
    ],
)
def test_layers_are_grouped_by_window(windows, groups):
    cache = make(4, windows=windows)
    assert cache._groups == groups
    assert cache.num_groups == len(groups)
    assert cache.layers_per_block == len(groups[0][1])
    assert [cache.window_of(n) for n in range(4)] == (windows or [-1] * 4)
    assert cache.nbytes == cache.layers_per_block * 32 * 2 * HEADS * 2 * DIM * 4


@pytest.mark.parametrize("layer", [-1, 4])
def test_layers_have_bounds(layer):
    with pytest.raises(IndexError, match="layer"):
        make(4).window_of(layer)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"windows": [1]}, numkv.DimensionMismatch, "`windows`: expected 2 numbers"),
        ({"windows": [-1, -2]}, numkv.DimensionMismatch, "`windows`: expected an integer of at l"),
        ({"windows": [-1, 2.5]}, TypeError, "`windows`: expected an integer, got float"),
        ({"block_size": 0}, numkv.DimensionMismatch, "`block_size`"),
        ({"num_blocks": -1}, numkv.DimensionMismatch, "`num_blocks`"),
        ({"layers": 0}, numkv.DimensionMismatch, "`num_layers`"),
        ({"head_dim_v": 0}, numkv.DimensionMismatch, "`head_dim_v`"),
    ],
)
def test_bad_geometry(options, error, match):
    with pytest.raises(error, match=match):
        make(**options)


def test_repr_says_what_is_in_it(cpu):
    cache = make(k_kind="fp16", v_kind="int8")
    started(cache, cpu[0], [1, 2, 3])
    assert "sequences=1, num_layers=2, blocks=2/32, block_size=2, kind=fp16/int8" in repr(cache)


# -- steps


def test_steps_end_once_and_belong_to_their_cache(cpu):
    to, _ = cpu
    cache, other = make(), make()
    seq = cache.add()
    step = cache.reserve([seq], [3])
    write(step, to, [[1, 2, 3]], [0])
    refused(
        other, numkv.NumkvError, "`step`: expected an open step of this cache", other.commit, step
    )
    cache.commit(step)
    q = queries(3)
    for call, args in (
        (cache.commit, (step,)),
        (cache.rollback, (step,)),
        (step.append, (0, *rows(0, [1, 2, 3]))),
        (step.attention, (0, q)),
    ):
        refused(cache, numkv.NumkvError, "expected an open step", call, *args)


@pytest.mark.parametrize("tokens", [0, 3])
def test_a_sequence_in_a_step_is_left_alone(tokens):
    """Also where it gets no token: the step holds its table."""
    cache = make()
    seq = cache.add()
    step = cache.reserve([seq], [tokens])
    for call, args in (
        (cache.reserve, ([seq], [1])),
        (cache.fork, (seq,)),
        (cache.remove, (seq,)),
        (cache.truncate, (seq, 0)),
        (cache.swap_out, (seq,)),
    ):
        refused(cache, numkv.NumkvError, f"`seq`: .*sequence {seq} .*open step", call, *args)
    cache.rollback(step)
    assert cache.num_free == cache.num_blocks
    cache.remove(seq)


@pytest.mark.parametrize(
    ("args", "error", "match"),
    [
        (([0, 0], [1, 1]), ValueError, "`sequences`: expected each sequence once"),
        (([0, 7], [1, 1]), IndexError, "`seq`: expected one of the cache's sequences, got 7"),
        (([-1], [1]), IndexError, "`seq`"),
        (([0, 1], [1, -1]), IndexError, "`new_lens`: expected no negative numbers"),
        (([0, 1], [1]), numkv.DimensionMismatch, "`new_lens`"),
        (([0, 1], [1.0, 2.0]), numkv.UnsupportedDType, "`new_lens`"),
        (([0, 1], [10, 55]), numkv.CacheFull, "blocks"),
    ],
)
def test_bad_reservations_take_nothing(cpu, args, error, match):
    cache = make()
    started(cache, cpu[0], [1, 2, 3])
    cache.add()
    refused(cache, error, match, cache.reserve, *args)


def test_bad_steps_change_nothing(target, to):
    cache = make(target=target)
    seqs = [cache.add(), cache.add()]
    step = cache.reserve(seqs, [2, 1])
    k, v = (to(np.ascontiguousarray(x)) for x in rows(0, [1, 2, 3, 4]))
    mismatch = numkv.DimensionMismatch
    refused(
        cache, mismatch, "`k`: expected rows of the step's 3 tokens, got 4", step.append, 0, k, v
    )
    refused(cache, mismatch, "`v`", step.append, 0, k[:3], v)
    refused(cache, IndexError, "`layer`", step.append, 2, k[:3], v[:3])
    refused(cache, IndexError, "`layer`", step.append, -1, k[:3], v[:3])
    q = to(queries(2))
    refused(cache, mismatch, "`q`: expected rows of the step's 3 tokens", step.attention, 0, q)
    qkv = to(np.zeros((2, (Q_HEADS + 2 * HEADS) * DIM), np.float32))
    options = {"num_q_heads": Q_HEADS, "qk_mode": 0}
    refused(cache, mismatch, "`qkv`: expected rows of the step's", step.write, 0, qkv, **options)
    refused(cache, IndexError, "`accepted`", cache.commit, step, [3, 0])
    refused(cache, IndexError, "`accepted`", cache.commit, step, [-1, 0])
    refused(cache, mismatch, "`accepted`", cache.commit, step, [1])
    refused(cache, mismatch, "`token_ids`", cache.commit, step, token_ids=[1, 2])
    refused(cache, ValueError, "`token_ids`", cache.commit, step, token_ids=[1, 2, -3])
    assert step.open
    cache.rollback(step)
    assert cache.num_free == cache.num_blocks


def test_rows_that_cannot_be_quantised(target, to):
    cache = make(kind="int8", target=target)
    step = cache.reserve([cache.add()], 2)
    k, v = (np.ascontiguousarray(x) for x in rows(0, [1, 2]))
    v[1, 0, 3] = np.nan
    refused(cache, numkv.NonFiniteInput, "`v`", step.append, 0, to(k), to(v))


@pytest.mark.parametrize("rotate", [False, True])
def test_a_fused_write_needs_rows_of_one_width(target, to, rotate):
    """V rows of another width than K rows are appended."""
    cache = make(head_dim_v=DIM // 2, target=target, rotate=rotate)
    step = cache.reserve([cache.add()], 1)
    for heads in (0.75 * HEADS, HEADS):
        qkv = to(np.zeros((1, int((Q_HEADS + 2 * heads) * DIM)), np.float32))
        refused(
            cache, numkv.DimensionMismatch, f"`qkv`: .*{DIM}, got {DIM // 2}; ", step.write, 0, qkv,
            num_q_heads=Q_HEADS, qk_mode=0,
        )  # fmt: skip


def test_positions_past_the_angles(target, to):
    cache = make(target=target)
    step = cache.reserve([cache.add()], [5])
    qkv = to(np.zeros((5, (Q_HEADS + 2 * HEADS) * DIM), np.float32))
    cos, sin = map(to, naive.rope_tables(4, DIM))
    options = {"num_q_heads": Q_HEADS, "qk_mode": 2, "cos": cos, "sin": sin}
    refused(cache, IndexError, "`cos`: .*position 4", step.write, 0, qkv, **options)


def test_empty_steps(target, to, host):
    cache = make(target=target)
    seq = cache.add()
    for seqs, lens in (([], []), ([seq], [0])):
        step = cache.reserve(seqs, lens)
        write(step, to, [[]] * len(seqs), [0] * len(seqs))
        assert host(step.attention(0, to(queries(0)))).shape == (0, Q_HEADS, DIM)
        cache.commit(step, token_ids=[])
    assert not host(cache.decode_attention(0, [seq], to(queries(1)))).any()
    assert host(cache.decode_attention(0, [], to(queries(0)))).shape == (0, Q_HEADS, DIM)


def test_accepted_tokens_stay_and_others_go(target, to, host):
    cache = make(target=target)
    seqs, texts = [cache.add(), cache.add()], [[1, 2, 3, 4, 5], [6, 7]]
    step = cache.reserve(seqs, np.array([5, 2]))
    assert step.positions.tolist() == [0, 1, 2, 3, 4, 0, 1]
    write(step, to, texts, [0, 0])
    cache.commit(step, [3, 0], token_ids=[1, 2, 3, 4, 5, 6, 7])
    assert [cache.length(s) for s in seqs] == [3, 0]
    assert cache.stats().pool.used == 2
    cache.check()
    check_attention(cache, to, host, seqs[0], [1, 2, 3])
    assert cache.cached_len(cache.add([1, 2, 3, 4, 5])) == 2


def test_rollback_leaves_no_trace(target, to, host):
    cache = make(target=target)
    seq = started(cache, to, [1, 2, 3])
    used = cache.stats().pool.used
    step = cache.reserve([seq], [9])
    write(step, to, [[1, 2, 3] + [0] * 9], [3])
    cache.rollback(step)
    assert cache.stats().pool.used == used
    check_attention(cache, to, host, seq, [1, 2, 3])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", [0, 1, 2, 3, 4])
def test_write_is_that_of_a_contiguous_layer(rng, kind, mode):
    """Bit for bit, in any order of blocks and whatever else is in the step."""
    cache = make(1, kind=kind, block_size=2)
    layer = numkv.ContiguousLayer(16, HEADS, DIM, kind=kind)
    holes = [cache.add() for _ in range(8)]
    fill(cache, holes, 2)
    for hole in holes[::2]:
        cache.remove(hole)
    seq, other = cache.add(), holes[1]
    cos, sin = naive.rope_tables(16, DIM)
    options = {"num_q_heads": Q_HEADS, "qk_mode": mode}
    if mode:
        options.update(cos=cos, sin=sin)
    if mode in naive.NORM_MODES:
        weights = rng.standard_normal((2, DIM), np.float32)
        options.update(q_norm_weight=weights[0], k_norm_weight=weights[1])
    for n in (5, 1, 3):
        qkv = rng.standard_normal((n + 2, (Q_HEADS + 2 * HEADS) * DIM), np.float32)
        step = cache.reserve([other, seq], [2, n])
        q = step.write(0, qkv, **options)
        assert np.array_equal(q[2:], layer.write(qkv[2:].copy(), **options))
        out = step.attention(0, q)[2:]
        tolerances.assert_rows_close(out, layer.decode_attention(q[2:].copy()), 1e-6)
        cache.commit(step)
    table = cache._sequences[seq].tables[0]
    for which in ("k", "v", "k_scale", "v_scale"):
        pool, want = getattr(cache._pools[0], which), getattr(layer.jit, which)
        if pool.size:
            got = np.concatenate(list(pool[table]), axis=1)[:, :9]
            assert np.array_equal(naive.words(got), naive.words(want[0, :, :9]))


@pytest.mark.parametrize("kind", ["fp32", "int8"])
def test_the_batch_does_not_matter(target, to, host, kind):
    """A sequence gives the same bits alone and among others, in any order."""
    cache = make(2, kind=kind, windows=[-1, 3], num_blocks=64, target=target)
    texts = [[1, 2, 3], [], list(range(17)), [5]]
    seqs = [started(cache, to, t) for t in texts]
    q = queries(4)
    for layer in range(2):
        every = host(cache.decode_attention(layer, seqs, to(q)))
        backwards = host(cache.decode_attention(layer, seqs[::-1], to(q[::-1].copy())))
        assert np.array_equal(every, backwards[::-1])
        for i, seq in enumerate(seqs):
            alone = host(cache.decode_attention(layer, [seq], to(q[i : i + 1])))
            assert np.array_equal(every[i : i + 1], alone)


def test_options_reach_the_kernels(target, to, host, rng):
    cache = make(1, target=target, windows=[2])
    seq, text = cache.add(), [1, 2, 3, 4, 5]
    step = cache.reserve([seq], 5)
    write(step, to, [text], [0])
    q, sinks = queries(5), rng.standard_normal(Q_HEADS).astype(np.float32)
    options = {"sm_scale": 0.3, "logits_soft_cap": 2.0}
    k, v = rows(0, text).transpose(0, 2, 1, 3)[:, None]
    want = naive.attention(q, k, v, [5], [0, 5], window_left=2, sinks=sinks, **options)
    buffer = to(np.zeros_like(q))
    given = {**options, "sinks": to(sinks), "return_lse": True}
    out, lse = step.attention(0, to(q), out=buffer, **given)
    tolerances.assert_rows_close(host(out), want[0], 1e-5)
    tolerances.assert_lse_close(host(lse), want[1])
    assert np.array_equal(host(out), host(buffer))
    cache.commit(step)
    out, lse = cache.decode_attention(0, [seq], to(q[4:]), **given)
    tolerances.assert_rows_close(host(out), want[0][4:], 1e-5)
    tolerances.assert_lse_close(host(lse), want[1][4:])


def test_bad_queries(cpu):
    cache = make()
    seq = started(cache, cpu[0], [1, 2])
    q = queries(1)
    mismatch = numkv.DimensionMismatch
    refused(cache, mismatch, "`q`: expected a query for", cache.decode_attention, 0, [seq, seq], q)
    refused(cache, IndexError, "`layer`", cache.decode_attention, 2, [seq], q)
    refused(cache, IndexError, "`seq`", cache.decode_attention, 0, [9], q)


# -- prefixes

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5]


@pytest.mark.parametrize("kind", ["fp32", "int8"])
def test_a_second_prompt_shares_the_first_ones_blocks(target, to, host, kind):
    cache = make(target=target, kind=kind)
    first = started(cache, to, PROMPT)
    used = cache.stats().pool.used
    text = PROMPT[:6] + [7, 7, 7]
    second = cache.add(text)
    assert cache.cached_len(second) == cache.length(second) == 6
    assert cache.stats().pool.used == used
    tables = [cache._sequences[s].tables[0] for s in (first, second)]
    assert np.array_equal(tables[0][:3], tables[1])
    grow(cache, to, second, text)
    check_attention(cache, to, host, first, PROMPT, kind=kind)
    check_attention(cache, to, host, second, text, kind=kind)


@pytest.mark.parametrize(
    ("length", "cached"), [(0, 0), (1, 0), (2, 0), (3, 2), (4, 2), (5, 4), (8, 6), (9, 8)]
)
def test_the_last_token_is_left_to_compute(cpu, length, cached):
    """And partial blocks are never shared."""
    cache = make()
    started(cache, cpu[0], PROMPT)
    assert cache.cached_len(cache.add(PROMPT[:length])) == cached
    cache.check()


def test_what_is_shared_stays_findable_without_a_sequence(cpu):
    to, host = cpu
    cache = make()
    cache.remove(started(cache, to, PROMPT))
    assert cache.stats().pool.used == 0
    seq = cache.add(PROMPT)
    assert cache.cached_len(seq) == 8
    grow(cache, to, seq, PROMPT)
    check_attention(cache, to, host, seq, PROMPT)


def test_extra_keys_keep_prompts_apart(cpu):
    to, host = cpu
    cache = make()
    extras = [None, {"adapter": 7}, {"adapter": 8}, {"salt": b"a"}, {"adapter": 7, "salt": b"a"}]
    seqs = []
    for salt, extra in enumerate(extras):
        seqs.append(cache.add(PROMPT, extra=extra))
        assert cache.cached_len(seqs[-1]) == 0
        grow(cache, to, seqs[-1], PROMPT[:4], salt=salt)
    for salt, extra in enumerate(extras):
        again = cache.add(PROMPT[:5], extra=extra)
        assert cache.cached_len(again) == 4
        for seq in (seqs[salt], again):
            check_attention(cache, to, host, seq, PROMPT[:4], salt=salt)


def test_nothing_of_the_callers_objects_is_kept(cpu):
    """What they say later is not what the cache was told."""
    to, host = cpu
    cache = make(num_blocks=40)
    started(cache, to, PROMPT, extra={"adapter": 1})
    tokens, extra = np.array(PROMPT, np.int32), {"adapter": 1}
    seq, empty = cache.add(tokens, extra=extra), cache.add(extra=extra)
    tokens[:], extra["adapter"] = 8, 2
    grow(cache, to, empty, [7, 7, 7])
    other = make()
    other.swap_in(cache.swap_out(seq))
    assert other.cached_len(other.add(PROMPT, extra={"adapter": 1})) == 8
    assert other.cached_len(other.add([8] * 9, extra={"adapter": 1})) == 0
    assert cache.cached_len(cache.add([7, 7, 7], extra={"adapter": 1})) == 2
    assert cache.cached_len(cache.add([7, 7, 7], extra={"adapter": 2})) == 0


def test_groups_never_share_with_one_another(cpu):
    """Two groups hold other layers of the same tokens; whatever the extra keys are called."""
    to, host = cpu
    cache = make(4, windows=[-1, 50, -1, 50])
    seqs = [started(cache, to, PROMPT)]
    seqs += [started(cache, to, PROMPT), cache.fork(seqs[0])]
    for group in (0, 1):
        other = cache.add(PROMPT, extra={"numkv group": group})
        assert cache.cached_len(other) == 0
    held = [set(t.tolist()) for t in cache._sequences[seqs[0]].tables]
    assert not held[0] & held[1]
    for seq in seqs:
        check_attention(cache, to, host, seq, PROMPT)


def test_without_ids_nothing_is_findable(cpu):
    to, _ = cpu
    cache = make()
    seq = started(cache, to, PROMPT[:5], named=False)
    grow(cache, to, seq, PROMPT)  # what comes before is not known, so this cannot be named
    assert cache.cached_len(cache.add(PROMPT)) == 0
    assert cache.stats().pool.cached == 0
    cache.truncate(seq, 0)
    grow(cache, to, seq, PROMPT)
    assert cache.cached_len(cache.add(PROMPT)) == 8


def test_a_block_that_fills_up_over_steps_is_findable(cpu):
    to, _ = cpu
    cache = make(block_size=4)
    seq = cache.add()
    for n in range(1, 10):
        grow(cache, to, seq, PROMPT[:n])
        assert cache.stats().pool.cached == n // 4
    assert cache.cached_len(cache.add(PROMPT)) == 8


def test_sliding_layers_need_their_window_only(cpu):
    """A long prompt is found though the sliding layers' first blocks have been given to others."""
    to, host = cpu
    cache = make(2, windows=[-1, 3], num_blocks=60)
    text = [n % 7 for n in range(41)]
    seq = cache.add()
    for n in range(2, 42, 3):
        grow(cache, to, seq, text[:n])
    table = cache._sequences[seq].tables[1]
    assert (table[:18] == -1).all()
    assert (table[18:] >= 0).all()
    squeeze = cache.add()
    fill(cache, [squeeze], 2 * (cache.num_free // 2))
    assert cache.stats().pool.evictions >= 10
    cache.remove(squeeze)
    again = cache.add(text)
    assert cache.cached_len(again) == 40
    grow(cache, to, again, text)
    check_attention(cache, to, host, again, text)
    assert cache.cached_len(cache.add(text[:30])) == 0  # its window is gone


@pytest.mark.parametrize("window", [0, 1, 2, 3, 4, 7])
def test_the_longest_prefix_that_every_group_has(cpu, monkeypatch, window):
    """Holes in the sliding group, against a search of all lengths one by one."""
    to, host = cpu
    size, blocks = 2, 10
    text = list(range(2 * blocks + 1))
    rng = np.random.default_rng(window)
    for _ in range(20):
        cache = make(2, windows=[-1, window], num_blocks=60)
        step = cache.reserve([cache.add()], [len(text)])  # registered before the window moves
        write(step, to, [text], [0])
        state = cache._sequences[0]
        with monkeypatch.context() as patch:
            patch.setattr("numkv.caches.paged.cache.release_behind_window", lambda *_: None)
            cache.commit(step, token_ids=text)
        lost = rng.random((2, blocks)) < [[0.04], [0.3]]
        for table, gone in zip(state.tables, lost, strict=True):
            cache.blocks.forget(table[:blocks][gone])
        release_behind_window(cache._store, state)
        want = max(
            n
            for n in range(blocks + 1)
            if not lost[0, :n].any()
            and not lost[1, max(0, n * size - 1 - window) // size : n].any()
        )
        seq = cache.add(text)
        assert cache.cached_len(seq) == want * size
        cache.check()
        if want:
            check_attention(cache, to, host, seq, text[: want * size])


# -- forks and truncation


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


# -- pins and swapping


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


# -- accounting


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


def test_check_finds_what_does_not_add_up(cpu):
    cache = make()
    seq = started(cache, cpu[0], PROMPT)
    state = cache._sequences[seq]
    for table in (state.tables[0][:-1], np.concatenate([state.tables[0], [9]])):
        whole, state.tables[0] = state.tables[0], table.astype(np.int32)
        with pytest.raises(numkv.NumkvError, match="expected"):
            cache.check()
        state.tables[0] = whole
    state.length += 2
    with pytest.raises(numkv.NumkvError, match="sequence 0"):
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
