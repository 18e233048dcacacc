"""`PagedKVCache`: groups and blocks, steps, attention."""

import naive
import numpy as np
import pytest
import tolerances
from paged_caches import check_attention, fill, make, queries, refused, rows, started, write

import numkv

HEADS, Q_HEADS, DIM = 2, 4, 8
KINDS = ["fp32", "fp16", "bf16", "int8", "int4"]


@pytest.fixture
def cpu():
    """`to` and `host` of tests that are about the host's bookkeeping."""
    return np.asarray, np.asarray


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
    assert [group[:2] for group in cache._groups] == groups
    assert cache.num_groups == len(groups)
    assert cache.layers_per_block == len(groups[0][1])
    assert [of.window_left for of in cache.layers] == (windows or [-1] * 4)
    assert cache.nbytes == cache.layers_per_block * 32 * 2 * HEADS * 2 * DIM * 4


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"windows": [-1, -2]}, numkv.DimensionMismatch, "`window_left`: expected an integer"),
        ({"windows": [-1, 2.5]}, TypeError, "`window_left`: expected an integer, got float"),
        ({"block_size": 0}, numkv.DimensionMismatch, "`block_size`"),
        ({"num_blocks": -1}, numkv.DimensionMismatch, "`num_blocks`"),
        ({"layers": 0}, numkv.DimensionMismatch, "`layers`"),
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


def test_a_layer_without_rows_is_not_attended_to(target, to):
    """Its new blocks may hold what another sequence has left there."""
    cache = numkv.PagedKVCache(2, 1, 8, num_blocks=2, block_size=4, kind="fp32", target=target)
    rows, q = (to(np.full((3, n, 8), 5, np.float32)) for n in (1, 2))
    seq = cache.add()
    step = cache.reserve([seq], 3)
    for layer in range(2):
        step.append(layer, rows, rows)
    cache.commit(step)
    cache.remove(seq)
    step = cache.reserve([cache.add()], 3)
    step.append(1, rows, rows)
    for call in (step.attention, step.attention_weights):
        with pytest.raises(numkv.NumkvError, match=r"layer 0 without; call step.append\(0, k, v\)"):
            call(0, q)
        call(1, q)
    step.mark_written(0)
    step.attention(0, q)


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
    if target == "cpu":
        refused(cache, numkv.NonFiniteInput, "`v`", step.append, 0, to(k), to(v))
        return
    step.append(0, to(k), to(v))
    for _ in range(2):  # again and again
        with pytest.raises(numkv.NonFiniteInput, match=r"`v`.*zeros") as caught:
            step.append(1, to(k), to(k))
        assert caught.value.index == (1, 0, 3)
    cache.rollback(step)
    (seq,) = cache.sequences
    step = cache.reserve([seq], 2)
    for layer in range(2):
        step.append(layer, to(k), to(k))
    step.append(0, to(k), to(v))
    with pytest.raises(numkv.NonFiniteInput, match=f"truncate sequence {seq} to 1 tokens"):
        cache.commit(step)
    cache.commit(step, accepted=[1])
    cache.commit(cache.reserve([seq], 0))
    cache.check()


@pytest.mark.parametrize("rotate", [False, True])
def test_a_fused_write_of_rows_of_two_widths(target, to, host, rng, rotate):
    """Narrow V rows stand where they stand among the projections, and are what `append` makes of them."""
    width, found = (Q_HEADS + HEADS) * DIM + HEADS * DIM // 2, []
    qkv = rng.standard_normal((2, width), np.float32)
    q, k, v = np.split(qkv, [Q_HEADS * DIM, (Q_HEADS + HEADS) * DIM], axis=1)
    for fused in (True, False):
        cache = make(head_dim_v=DIM // 2, target=target, rotate=rotate)
        step = cache.reserve([cache.add()], 2)
        wide = to(np.zeros((2, (Q_HEADS + 2 * HEADS) * DIM), np.float32))
        refused(
            cache, numkv.DimensionMismatch, f"`qkv`: .*{width}", step.write, 0, wide,
            num_q_heads=Q_HEADS, qk_mode=0,
        )  # fmt: skip
        if fused:
            written = host(step.write(0, to(qkv), num_q_heads=Q_HEADS, qk_mode=0))
            assert np.array_equal(written.reshape(2, -1), q)
        else:
            step.append(0, to(k.reshape(2, HEADS, DIM)), to(v.reshape(2, HEADS, DIM // 2)))
        found.append(host(step.attention(0, to(q.reshape(2, Q_HEADS, DIM)))))
    assert np.array_equal(*found)


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
    assert cache.cached_len(cache.add([1, 2, 3, 4, 5])) == 3


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
        pool, want = getattr(cache._pools[0], which), getattr(layer._pool, which)
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
