"""Sparse reading in steps of a `PagedKVCache` that keeps the bounds of its keys."""

import pickle

import naive
import naive_sparse
import numpy as np
import paged_caches
import pytest
import tolerances
from layer_lists import paged_kv_cache
from paged_caches import DIM, HEADS, Q_HEADS, make, queries
from several_threads import in_threads

import numkv

F32 = np.float32
SIZE = 4


def made(rng, to, lens, kind="fp32", layers=1, **options):
    """A cache with a step in which sequences have one new token, and the stored values of their rows."""
    options = {"num_blocks": 64, "block_size": SIZE, "key_bounds": True} | options
    cache = make(layers, kind=kind, **options)
    seqs = [cache.add() for _ in lens]
    shadows = [rng.standard_normal((layers, 2, n, HEADS, DIM)).astype(F32) for n in lens]
    for n in (slice(0, -1), slice(-1, None)):
        step = cache.reserve(seqs, [len(range(x)[n]) for x in lens])
        for layer in range(layers):
            rows = np.concatenate([x[layer][:, n] for x in shadows], 1)
            step.append(layer, *(to(np.ascontiguousarray(x)) for x in rows))
        if n.start == 0:
            cache.commit(step)
    if kind in naive.CODES:
        shadows = [naive.dequantise(*naive.quantise(x, kind)) for x in shadows]
    else:
        shadows = [naive.round_to(x, kind) for x in shadows]
    return cache, step, shadows


@pytest.mark.parametrize("kind", ["fp32", "bf16", "int8"])
def test_each_head_reads_what_its_bounds_choose(target, to, host, rng, kind):
    lens = [50, 1, 9, 33]
    _, step, shadows = made(rng, to, lens, kind, target=target)
    q, sinks = queries(len(lens)), rng.standard_normal(Q_HEADS).astype(F32)
    bound = tolerances.attention(kind, "fp32")
    for options in (
        {"most_blocks": 3},
        {"most_blocks": 5, "first": 0, "newest": 2, "sm_scale": -0.7},
        {"most_blocks": 4, "logits_soft_cap": 3.0, "sinks": sinks},
    ):
        given = options | ({"sinks": to(sinks)} if "sinks" in options else {})
        out, lse = map(host, step.sparse_attention(0, to(q), return_lse=True, **given))
        most = options["most_blocks"]
        named = {n: x for n, x in options.items() if n != "most_blocks"}
        for i, (k, v) in enumerate(x[0] for x in shadows):
            want, of_want = naive_sparse.attention(q[i], k, v, SIZE, most, **named)
            tolerances.assert_rows_close(out[i], want, bound)
            np.testing.assert_allclose(
                lse[i], of_want, rtol=max(1e-5, bound), atol=max(1e-5, bound)
            )


def test_a_rotated_cache_chooses_by_rotated_keys(target, to, host, rng):
    """Rotation changes the bounds, and so the choice; all blocks give what they give without."""
    _, step, shadows = made(rng, to, [41], "fp32", target=target, rotate=True)
    signs = step._store.pools[0].k_rotation.signs
    turn = naive.rotation(signs)
    q, (k, v) = queries(1), shadows[0][0].astype(np.float64)
    out = host(step.sparse_attention(0, to(q), most_blocks=4))[0]
    want, _ = naive_sparse.attention(q[0] @ turn.T, k @ turn.T, v @ turn.T, SIZE, 4)
    tolerances.assert_rows_close(out, want @ turn, 1e-4)


def test_short_sequences_have_the_bits_of_attention(target, to, host, rng):
    """In any batch: alone, where nothing is to be chosen, and beside a sequence of which blocks are."""
    lens = [11, 90, 16]
    _, step, _ = made(rng, to, lens, "bf16", target=target)
    q = to(queries(3))
    dense, lse = map(host, step.attention(0, q, return_lse=True))
    for most in (4, 30):
        got, of_got = map(host, step.sparse_attention(0, q, most_blocks=most, return_lse=True))
        for i in [0, 2] if most == 4 else [0, 1, 2]:
            if target == "cpu":
                assert np.array_equal(got[i], dense[i])
                assert np.array_equal(of_got[i], lse[i])
            np.testing.assert_allclose(got[i], dense[i], atol=1e-4)


@pytest.mark.parametrize("sinks", [None, [0.3, -2.0, 1.0, 0.0]])
def test_results_do_not_depend_on_the_batch(target, to, host, rng, sinks):
    cache, step, shadows = made(rng, to, [50, 21, 3], target=target)
    q, sinks = queries(3), None if sinks is None else to(np.array(sinks, F32))
    together = host(step.sparse_attention(0, to(q), most_blocks=3, sinks=sinks))
    cache.rollback(step)
    for i, seq in enumerate(cache.sequences):
        alone = cache.reserve([seq], 1)
        alone.append(0, *(to(np.ascontiguousarray(x)) for x in shadows[i][0][:, -1:]))
        got = host(alone.sparse_attention(0, to(q[i : i + 1]), most_blocks=3, sinks=sinks))
        assert np.array_equal(got[0], together[i])
        cache.rollback(alone)


def test_drafts_choose_each_for_itself(target, to, host, rng):
    """The bits of a step of that token alone: later drafts in the same block change no choice."""
    cache, step, shadows = made(rng, to, [30, 22], target=target, num_blocks=40)
    cache.rollback(step)
    drafts, q = [5, 2], queries(7)
    rows = [rng.standard_normal((2, n, HEADS, DIM)).astype(F32) * 3 for n in drafts]
    step = cache.reserve(cache.sequences, drafts)
    step.append(0, *(to(x) for x in np.concatenate(rows, 1)))
    together = host(step.sparse_attention(0, to(q), most_blocks=3))
    cache.rollback(step)
    at = 0
    for seq, new, old in zip(cache.sequences, rows, shadows, strict=True):
        k, v = old[0][:, :-1]
        for t in range(new.shape[1]):
            step = cache.reserve([seq], 1)
            step.append(0, *(to(np.ascontiguousarray(x)) for x in new[:, t : t + 1]))
            alone = host(step.sparse_attention(0, to(q[at : at + 1]), most_blocks=3))[0]
            cache.commit(step)
            k, v = np.concatenate([k, new[0, t : t + 1]]), np.concatenate([v, new[1, t : t + 1]])
            assert np.array_equal(together[at], alone)
            want, _ = naive_sparse.attention(q[at], k, v, SIZE, 3)
            tolerances.assert_rows_close(alone, want, 1e-5)
            at += 1


# -- through the life of sequences


class Life:
    """A cache beside plain arrays of rows; what sequences begin with alike is shared."""

    def __init__(self, rng, to, host, **options):
        self.rng, self.to, self.host = rng, to, host
        self.cache = make(2, num_blocks=48, block_size=SIZE, key_bounds=True, **options)
        self.rows: dict[int, np.ndarray] = {}  # (layer, K or V, token, head, dim)
        self.texts: dict[int, list[int] | None] = {}  # None once rows say nothing of tokens
        angles = np.arange(64)[:, None] * np.array([1.0, 0.3, 0.1, 0.01])
        self.tables = np.cos(angles), np.sin(angles)
        self.shift = numkv.rope_shift(*(x.astype(F32) for x in self.tables))

    def new_rows(self, text, begin):
        if text is None:
            n = -begin
            return self.rng.standard_normal((2, 2, n, HEADS, DIM)).astype(F32)
        return np.stack([paged_caches.rows(layer, text, begin) for layer in range(2)])

    def known(self):
        return list(self.rows)

    def add(self):
        prompt = self.rng.integers(0, 2, self.rng.integers(1, 30)).tolist()
        seq = self.cache.add(prompt)
        n = self.cache.length(seq)
        self.texts[seq] = prompt[:n]
        self.rows[seq] = self.new_rows(prompt, 0)[:, :, :n]
        self.step([seq], [len(prompt) - n], {seq: prompt})

    def step(self, seqs, lens, texts=None, accepted=None, commit=True):
        """Sequences grow, and in all layers the new tokens read sparsely before and after rows are written again."""
        cache, new, after = self.cache, [], {}
        step = cache.reserve(seqs, lens)
        for seq, n in zip(seqs, lens, strict=True):
            text = (texts or {}).get(seq)
            if text is None and self.texts[seq] is not None:
                text = [*self.texts[seq], *self.rng.integers(0, 2, n).tolist()]
            after[seq] = text
            have = self.rows[seq].shape[2]
            new.append(self.new_rows(text, have if text is not None else -n))
        rows = np.concatenate(new, 2)
        for layer in range(2):
            if self.rng.random() < 0.3:  # other rows first, which these take the place of
                step.append(layer, *(self.to(x * 5) for x in rows[layer]))
                if step.num_tokens:
                    step.sparse_attention(layer, self.to(queries(step.num_tokens)), most_blocks=3)
            step.append(layer, *(self.to(np.ascontiguousarray(x)) for x in rows[layer]))
            if self.rng.random() < 0.6:  # else its blocks wait
                self.look(step, layer, seqs, new)
        if not commit:
            cache.rollback(step)
            return
        keep = lens if accepted is None else accepted
        ids = None
        if all(after[seq] is not None for seq in seqs):
            ids = [
                t
                for seq, n in zip(seqs, lens, strict=True)
                for t in after[seq][len(after[seq]) - n :]
            ]
        cache.commit(step, accepted, token_ids=ids)
        for seq, part, n in zip(seqs, new, keep, strict=True):
            have = self.rows[seq].shape[2]
            self.rows[seq] = np.concatenate([self.rows[seq], part[:, :, :n]], 2)
            self.texts[seq] = None if ids is None else after[seq][: have + n]

    def look(self, step, layer, seqs, new):
        """Each new token reads what the definition says."""
        q = queries(step.num_tokens)
        most = int(self.rng.integers(2, 6))
        got, at = self.host(step.sparse_attention(layer, self.to(q), most_blocks=most)), 0
        for seq, part in zip(seqs, new, strict=True):
            k, v = np.concatenate([self.rows[seq][layer], part[layer]], 1)
            begin = self.rows[seq].shape[2]
            for t in range(part.shape[2]):
                seen = begin + t + 1
                want, _ = naive_sparse.attention(q[at], k[:seen], v[:seen], SIZE, most)
                tolerances.assert_rows_close(got[at], want, 2e-5)
                at += 1

    def some(self):
        return int(self.rng.choice(self.known()))

    def remove(self):
        seq = self.some()
        self.cache.remove(seq)
        del self.rows[seq], self.texts[seq]

    def fork(self):
        seq = self.some()
        other = self.cache.fork(seq)
        self.rows[other], self.texts[other] = self.rows[seq], self.texts[seq]

    def truncate(self):
        seq = self.some()
        n = int(self.rng.integers(self.rows[seq].shape[2] + 1))
        self.cache.truncate(seq, n)
        self.cut(seq, n)

    def cut(self, seq, n):
        self.rows[seq] = self.rows[seq][:, :, :n]
        self.texts[seq] = self.texts[seq] and self.texts[seq][:n]

    def compact(self):
        seq = self.some()
        n = self.rows[seq].shape[2]
        keep = np.flatnonzero(self.rng.random(n) < 0.7)
        shifted = bool(self.rng.integers(2))
        self.cache.compact(seq, keep, self.shift if shifted else None)
        rows = self.rows[seq][:, :, keep].copy()
        if shifted:
            cos, sin = self.tables
            for i, by in enumerate(keep - np.arange(len(keep))):
                rows[:, 0, i] = naive.rope(rows[:, 0, i], cos[by], -sin[by], False)
        self.rows[seq], self.texts[seq] = rows, None

    def swap(self):
        seq = self.some()
        swapped = self.cache.swap_out(seq)
        self.cache.remove(seq)
        other = self.cache.swap_in(swapped)
        self.rows[other], self.texts[other] = self.rows.pop(seq), None
        self.texts.pop(seq)

    def grow(self):
        seqs = self.rng.permutation(self.known())[:2].tolist()
        lens = self.rng.integers(0, 7, len(seqs)).tolist()
        how = self.rng.integers(3)
        accepted = [int(self.rng.integers(n + 1)) for n in lens] if how == 0 else None
        self.step(seqs, lens, accepted=accepted, commit=how != 1)

    def play(self, turns):
        for _ in range(turns):
            names = ["add", "fork", "truncate", "compact", "swap", "remove", *["grow"] * 5]
            name = str(self.rng.choice(names)) if self.rows else "add"
            try:
                getattr(self, name)()
            except numkv.CacheFull:
                for seq in self.known()[:-1]:
                    self.cache.remove(seq)
                    del self.rows[seq], self.texts[seq]
            self.cache.check()
            self.hold()

    def hold(self):
        """What bounds are said to speak for, they do."""
        store = self.cache._store
        for part, pool in enumerate(store.pools):
            covered = store.bounds.covered(part)
            low, high = (self.host(x) for x in store.bounds._arrays[part])
            k = self.host(pool.k)
            for state in self.cache._sequences.values():
                for j, block in enumerate(state.tables[0].tolist()):
                    n = min(covered[block], state.length - j * SIZE)
                    if n > 0:
                        assert (low[block] <= k[block, :, :n].min(1)).all()
                        assert (high[block] >= k[block, :, :n].max(1)).all()


@pytest.mark.parametrize("seed", range(2))
def test_bounds_through_the_life_of_sequences(seed):
    life = Life(np.random.default_rng(seed), np.asarray, np.asarray)
    life.play(50)


def test_bounds_through_a_short_life(target, to, host, rng):
    life = Life(rng, to, host, target=target)
    life.play(5)


def again(cache, folder):
    """A cache by the ways that lead out of a process and back."""
    numkv.save(folder / "it.nkv", cache)
    yield numkv.load(folder / "it.nkv")
    yield pickle.loads(pickle.dumps(cache))
    yield cache.copy()


def test_copies_and_files(rng, tmp_path):
    life = Life(rng, np.asarray, np.asarray)
    life.play(12)
    while not life.rows:
        life.add()
    for cache in again(life.cache, tmp_path):
        assert cache.layers[0].key_bounds
        assert cache.nbytes == life.cache.nbytes
        other = Life(rng, np.asarray, np.asarray)
        other.cache, other.rows, other.texts = cache, dict(life.rows), dict.fromkeys(life.texts)
        other.play(4)
    plain = make(1)
    numkv.save(tmp_path / "plain.nkv", plain)
    assert not numkv.load(tmp_path / "plain.nkv").layers[0].key_bounds


def test_blocks_from_a_store(rng, tmp_path):
    """What a store brings into blocks that other rows were bounded in."""
    text = rng.integers(0, 9, 33).tolist()
    with numkv.store.PrefixStore(tmp_path, mark="it") as store:
        first = Life(rng, np.asarray, np.asarray, store=store)
        seq = first.cache.add(text)
        first.rows[seq], first.texts[seq] = first.new_rows(text, 0)[:, :, :0], []
        first.step([seq], [len(text)], {seq: text})
        store.flush()
        second = Life(rng, np.asarray, np.asarray, store=store)
        for _ in range(4):
            second.step([_begun(second)], [24])
        for _ in range(4):
            second.remove()
        second.cache.blocks.forget()
        seq = second.cache.add(text)
        assert second.cache.cached_len(seq) == 32
        second.texts[seq], second.rows[seq] = text[:32], second.new_rows(text, 0)[:, :, :32]
        second.step([seq], [1], {seq: text})


def _begun(life):
    seq = life.cache.add()
    life.rows[seq], life.texts[seq] = life.new_rows(None, 0), None
    return seq


def test_rows_of_own_kernels(rng):
    """Nothing tells the bounds of these but that the step reserved their slots."""
    cache, step, shadows = made(rng, np.asarray, [34], layers=2)
    cache.commit(step)
    step = cache.reserve([0], 3)
    rows = rng.standard_normal((2, 3, HEADS, DIM)).astype(F32) * 4
    for layer in range(2):
        found = step.arrays(layer)
        for x, new in ((found.k, rows[0]), (found.v, rows[1])):
            x[found.slots // SIZE, :, found.slots % SIZE] = new
    step.mark_written()
    q = queries(3)
    got = step.sparse_attention(1, q, most_blocks=3)
    k, v = np.concatenate([shadows[0][1], rows], 1)
    for t in range(3):
        want, _ = naive_sparse.attention(q[t], k[: 35 + t], v[: 35 + t], SIZE, 3)
        tolerances.assert_rows_close(got[t], want, 1e-5)


def test_rows_of_bound_calls_and_fused_writes(rng):
    cache, step, shadows = made(rng, np.asarray, [34])
    cache.commit(step)
    k, v = shadows[0][0]
    for turn in range(6):
        step = cache.reserve([0], 1)
        if turn % 2:
            new = rng.standard_normal((2, 1, HEADS, DIM)).astype(F32) * 3
            cache.bind(num_q_heads=Q_HEADS).begin(step)(0, queries(1), *new)
        else:
            qkv = rng.standard_normal((1, (Q_HEADS + 2 * HEADS) * DIM)).astype(F32) * 3
            step.write(0, qkv, num_q_heads=Q_HEADS, qk_mode=numkv.QKMode(0))
            new = qkv[0, Q_HEADS * DIM :].reshape(2, 1, HEADS, DIM)
        k, v = np.concatenate([k, new[0]]), np.concatenate([v, new[1]])
        if turn != 2:  # rows that nobody has read sparsely yet
            got = step.sparse_attention(0, queries(1), most_blocks=3)[0]
            want, _ = naive_sparse.attention(queries(1)[0], k, v, SIZE, 3)
            tolerances.assert_rows_close(got, want, 1e-5)
        cache.commit(step)


def test_layers_that_read_others_and_windows(rng):
    """A layer that reads another's rows has its bounds; a window within the blocks to read is read whole."""
    cache = make(
        4, num_blocks=64, block_size=SIZE, key_bounds=True, windows=[-1, 5, -1, 5], shares={2: 0}
    )
    seq, rows = cache.add(), rng.standard_normal((2, 40, HEADS, DIM)).astype(F32)
    for part in (slice(0, 39), slice(39, 40)):
        step = cache.reserve([seq], len(range(40)[part]))
        for layer in (0, 1, 3):
            step.append(layer, *(np.ascontiguousarray(x) for x in rows[:, part]))
        if part.start == 0:
            cache.commit(step)
    q = queries(1)
    want, _ = naive_sparse.attention(q[0], *rows, SIZE, 3)
    for layer in (0, 2):
        got = step.sparse_attention(layer, q, most_blocks=3)[0]
        tolerances.assert_rows_close(got, want, 1e-5)
    for layer in (1, 3):
        got = step.sparse_attention(layer, q, most_blocks=3)
        assert np.array_equal(got, step.attention(layer, q))
        with pytest.raises(numkv.NotSupported, match=r"window of 6 tokens, up to 3 blocks, and 2"):
            step.sparse_attention(layer, q, most_blocks=2)


def test_chunks_within_the_blocks_to_read(rng):
    cache = make(1, num_blocks=16, block_size=SIZE, key_bounds=True, chunks=[6])
    step = cache.reserve([cache.add()], 20)
    step.append(0, *rng.standard_normal((2, 20, HEADS, DIM)).astype(F32))
    q = queries(20)
    assert np.array_equal(step.sparse_attention(0, q, most_blocks=3), step.attention(0, q))
    with pytest.raises(numkv.NotSupported, match="chunks of 6 tokens"):
        step.sparse_attention(0, q, most_blocks=2)


def test_nan_is_read_rather_than_left_out(target, to, host, rng):
    cache, step, _ = made(rng, to, [30], target=target)
    cache.commit(step)
    step, bad = cache.reserve([0], 1), np.ones((1, HEADS, DIM), F32)
    bad[0, 0, 3] = np.nan  # kv head 0 alone
    step.append(0, to(bad), to(np.ones_like(bad)))
    cache.commit(step)
    step = cache.reserve([0], 9)
    step.append(0, *(to(rng.standard_normal((9, HEADS, DIM)).astype(F32)) for _ in "kv"))
    got = host(step.sparse_attention(0, to(queries(9)), most_blocks=3))[-1]
    assert np.isnan(got[:2]).all()
    assert np.isfinite(got[2:]).all()


def test_rows_that_are_none_are_told_of_late(rng):
    """On CUDA the kernel that writes finds them; a sparse read says nothing, the commit does."""
    from numkv import targets

    to = targets.get("cuda").asarray
    cache, step, _ = made(rng, to, [30], "int8", target="cuda")
    cache.commit(step)
    step, bad = cache.reserve([0], 1), np.ones((1, HEADS, DIM), F32)
    bad[0, 1, 3] = np.nan
    step.append(0, to(bad), to(np.ones_like(bad)))
    step.sparse_attention(0, to(queries(1)), most_blocks=3)
    with pytest.raises(numkv.NonFiniteInput, match="truncate sequence 0 to 30 tokens"):
        cache.commit(step)
    cache.rollback(step)


def test_steps_of_several_threads_share_a_prefix(rng):
    """Whose blocks nobody has bounded yet: one step does, the others wait for it."""
    cache, step, shadows = made(rng, np.asarray, [60])
    cache.commit(step)
    seqs = [0, cache.fork(0), cache.fork(0)]
    q, (k, v) = queries(1), shadows[0][0]
    new = rng.standard_normal((2, 1, HEADS, DIM)).astype(F32)
    want, _ = naive_sparse.attention(
        q[0], np.concatenate([k, new[0]]), np.concatenate([v, new[1]]), SIZE, 4
    )
    steps = [cache.reserve([seq], 1) for seq in seqs]
    found = {}

    def run(number):
        steps[number].append(0, *new)
        found[number] = steps[number].sparse_attention(0, q, most_blocks=4)[0]

    for _ in range(5):
        cache._store.bounds.forget(np.arange(cache.num_blocks))
        in_threads(*(lambda n=n: run(n) for n in range(3)))
        for got in found.values():
            tolerances.assert_rows_close(got, want, 1e-5)


def test_bytes(rng):
    plain, kept = make(2, block_size=SIZE), make(2, block_size=SIZE, key_bounds=True)
    assert kept.layers[0].key_bounds
    assert not plain.layers[0].key_bounds
    more = 2 * 32 * HEADS * DIM * 2 * 4  # layers, blocks, heads, elements, two bounds in float32
    assert kept.nbytes == plain.nbytes + more
    by_bytes = paged_kv_cache(
        2, HEADS, DIM, max_nbytes=kept.nbytes, block_size=SIZE, kind="fp32", key_bounds=True
    )
    assert by_bytes.num_blocks == 32
    assert by_bytes.nbytes == kept.nbytes


def test_out_and_errors(rng):
    cache, step, _ = made(rng, np.asarray, [30, 22])
    q = queries(2)
    odd = np.empty((2, Q_HEADS, 4 * DIM + 1), np.uint8)[..., 1:].view(F32)
    for bad in ({"out": odd}, {"sinks": np.full(Q_HEADS, np.nan, F32)}):
        with pytest.raises((numkv.NotSupported, ValueError), match=next(iter(bad))):
            step.sparse_attention(0, q, most_blocks=3, **bad)
        assert not cache._store.bounds.covered(0).any()  # nothing was bounded
    want = step.sparse_attention(0, q, most_blocks=3)
    for out in (np.empty_like(q), np.empty((2, 8, DIM), F32)[:, ::2], q.copy()):
        given = out if out.shape == q.shape and np.array_equal(out, q) else q
        assert step.sparse_attention(0, given, most_blocks=3, out=out) is out
        assert np.array_equal(out, want)
    with pytest.raises(numkv.DimensionMismatch, match="most_blocks"):
        step.sparse_attention(0, q, most_blocks=2, first=1, newest=2)
    with pytest.raises(numkv.DimensionMismatch, match="most_blocks"):
        step.sparse_attention(0, q, most_blocks=0)
    with pytest.raises(numkv.DimensionMismatch, match="`q`"):
        step.sparse_attention(0, q[:1], most_blocks=3)
    with pytest.raises(IndexError, match="layer"):
        step.sparse_attention(1, q, most_blocks=3)
    with pytest.raises(ValueError, match="sinks"):
        step.sparse_attention(0, q, most_blocks=3, sinks=np.full(Q_HEADS, np.nan, F32))
    with pytest.raises(numkv.NotSupported, match="out"):
        step.sparse_attention(
            0, q, most_blocks=3, out=step.arrays(0).k.reshape(-1)[: q.size].reshape(q.shape)
        )
    cache.rollback(step)
    with pytest.raises(numkv.NumkvError, match="open step"):
        step.sparse_attention(0, q, most_blocks=3)
    step = cache.reserve([0], 1)
    with pytest.raises(numkv.NumkvError, match="rows"):
        step.sparse_attention(0, q[:1], most_blocks=3)


def test_what_is_refused(rng):
    rows = rng.standard_normal((2, 2, HEADS, DIM)).astype(F32)
    cache = make(1)
    step = cache.reserve([cache.add()], 2)
    step.append(0, *rows)
    with pytest.raises(numkv.NotSupported, match="key_bounds=True"):
        step.sparse_attention(0, queries(2), most_blocks=3)
    cache = make(1, key_bounds=True)
    step = cache.reserve([cache.add()], 2, parents=[-1, -1])
    step.append(0, *rows)
    with pytest.raises(numkv.NotSupported, match="tree"):
        step.sparse_attention(0, queries(2), most_blocks=3)
    step = cache.reserve([cache.add()], 1, into=cache.step_buffers(1))
    step.append(0, *rows[:, :1])
    with pytest.raises(numkv.NotSupported, match="StepBuffers"):
        step.sparse_attention(0, queries(1), most_blocks=3)
    with pytest.raises(numkv.NotSupported, match="latents"):
        make(1, key_bounds=True, head_dim_v=4, v_kind="latent")
    with pytest.raises(TypeError, match="key_bounds"):
        make(1, key_bounds=3)
