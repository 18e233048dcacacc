"""Who sees what, in caches: ranges and biases by name, and steps of a `PagedKVCache` over trees of drafts."""

import re
from pathlib import Path

import naive
import numpy as np
import pytest
import tolerances
from layer_lists import paged_kv_cache

import numkv
from numkv.errors import DimensionMismatch, NotSupported, NumkvError, UnsupportedDType

HEADS, KV_HEADS, DIM = 4, 2, 8
BOUND = tolerances.attention("fp32", "fp32")


def rows(rng, tokens, heads=KV_HEADS):
    return rng.standard_normal((tokens, heads, DIM)).astype(np.float32)


def expect(q, k, v, n, **oracle):
    """The oracle over one sequence whose rows are in order."""
    k, v = (np.stack(x[:n], axis=1)[None] for x in (k, v))
    return naive.attention_to_seen(q, k, v, [n], [0, len(q)], **oracle)[0]


@pytest.fixture
def slopes():
    return (2.0 ** -np.arange(1.0, 1 + HEADS)).astype(np.float32)


# ---------------------------------------------------------------- by name


@pytest.mark.parametrize("made", ["contiguous", "paged", "cache"])
def test_layers_and_caches_take_them_by_name(target, to, host, rng, slopes, made):
    k, v, q = rows(rng, 21), rows(rng, 21), rows(rng, 5, HEADS)
    if made == "cache":
        cache = numkv.KVCache(1, KV_HEADS, DIM, kind="fp32", target=target)
        cache.append(0, to(k), to(v))
        attend = lambda **given: cache.decode_attention(0, to(q), **given)  # noqa: E731
    else:
        if made == "paged":
            layer = numkv.PagedLayer(8, 4, KV_HEADS, DIM, kind="fp32", target=target)
        else:
            layer = numkv.ContiguousLayer(32, KV_HEADS, DIM, kind="fp32", target=target)
        layer.append(to(k), to(v))
        attend = lambda **given: layer.decode_attention(to(q), **given)  # noqa: E731
    parents, spans = (
        np.array([-1, 0, 0, 1, -1]),
        np.array([[0, 3], [2, 2], [4, 50], [-1, 7], [0, 21]]),
    )
    for given, oracle in (
        ({"causal": False}, {"causal": False}),
        ({"ranges": to(spans)}, {"ranges": spans}),
        ({"alibi_slopes": to(slopes), "window_left": 6}, {"slopes": slopes, "window_left": 6}),
        ({"mask": to(numkv.tree_mask(parents))}, {"parents": parents}),
    ):  # fmt: skip
        tolerances.assert_rows_close(host(attend(**given)), expect(q, k, v, 21, **oracle), BOUND)
    tolerances.assert_rows_close(host(attend()), expect(q, k, v, 21), BOUND)


def test_cross_attention_over_a_layer_of_few_tokens(target, to, host, rng):
    k, v, q = rows(rng, 3), rows(rng, 3), rows(rng, 6, HEADS)
    layer = numkv.ContiguousLayer(4, KV_HEADS, DIM, kind="fp32", target=target)
    layer.append(to(k), to(v))
    found = host(layer.decode_attention(to(q), causal=False))
    tolerances.assert_rows_close(found, expect(q, k, v, 3, causal=False), BOUND)
    with pytest.raises(DimensionMismatch, match="at most as many queries"):
        layer.decode_attention(to(q))
    with pytest.raises(DimensionMismatch, match=r"or `causal=False` without a mask$"):
        layer.decode_attention(to(q), causal=False, mask=to(np.full((6, 1), 63, np.uint32)))


def test_full_precision_tokens_take_ranges_and_refuse_the_rest(target, to, host, rng, slopes):
    k, v, q = rows(rng, 12), rows(rng, 12), rows(rng, 3, HEADS)
    cache = numkv.KVCache(
        1,
        KV_HEADS,
        DIM,
        kind="int8",
        target=target,
        full_precision=numkv.FullPrecision(4, 2),
    )
    cache.append(0, to(k), to(v))
    spans = np.array([[0, 12], [1, 9], [8, 20]])
    stored = [host(x) for x in (cache.k(0), cache.v(0))]
    bound = tolerances.attention("int8", "fp32")
    for given, oracle in (
        ({"ranges": to(spans)}, {"ranges": spans}), ({"causal": False}, {"causal": False}),
    ):  # fmt: skip
        found = host(cache.decode_attention(0, to(q), **given))
        tolerances.assert_rows_close(found, expect(q, *stored, 12, **oracle), bound)
    for refused in ({"mask": to(numkv.tree_mask([-1, 0, 0]))}, {"alibi_slopes": to(slopes)}):
        with pytest.raises(NotSupported, match=next(iter(refused))):
            cache.decode_attention(0, to(q), **refused)


# ---------------------------------------------------------------- trees of drafts


class Trees:
    """A cache whose layers have a window and none, and what its sequences should hold."""

    def __init__(self, rng, target, to, kind="fp32"):
        self.rng, self.to = rng, to
        self.cache = paged_kv_cache(
            2, KV_HEADS, DIM, num_blocks=64, block_size=4, windows=[-1, 6], kind=kind, target=target
        )  # fmt: skip
        self.rows = {}

    def prompt(self, n):
        seq = self.cache.add()
        step = self.cache.reserve([seq], n)
        self.rows[seq] = self.write(step)
        self.cache.commit(step)
        return seq

    def write(self, step):
        """Random rows in both layers; of each the K and V."""
        made = [
            (rows(self.rng, step.num_tokens), rows(self.rng, step.num_tokens)) for _ in range(2)
        ]
        for layer, (k, v) in enumerate(made):
            step.append(layer, self.to(k), self.to(v))
        return made

    def joined(self, seq, made, kept):
        """The rows of a sequence with some of those of a step behind them."""
        return [
            tuple(np.concatenate([old, new[kept]]) for old, new in zip(olds, news, strict=True))
            for olds, news in zip(self.rows[seq], made, strict=True)
        ]


def test_a_tree_is_attended_to_and_its_path_kept(target, to, host, rng, slopes):
    """Two sequences, in blocks of four: paths move rows across blocks; positions are depths."""
    trees = Trees(rng, target, to)
    lens, parents = (7, 10), [[-1, 0, 0, 1, 2, 3, 5], [-1, -1, 1, 2, 0]]
    paths = [[0, 1, 3, 5, 6], [1, 2]]
    seqs = [trees.prompt(n) for n in lens]
    new = [len(p) for p in parents]
    step = trees.cache.reserve(seqs, new, parents=parents[0] + parents[1])
    np.testing.assert_array_equal(
        step.positions, [7, 8, 8, 9, 9, 10, 11, 10, 10, 11, 12, 11]
    )  # fmt: skip
    made = trees.write(step)
    q = rows(rng, step.num_tokens, HEADS)
    ends = np.cumsum([0, *new])
    for layer, window in enumerate((-1, 6)):
        for given in ({}, {"slopes": slopes}):
            options = {"alibi_slopes": to(slopes)} if given else {}
            found = host(step.attention(layer, to(q), **options))
            for i, seq in enumerate(seqs):
                part = slice(ends[i], ends[i + 1])
                k, v = trees.joined(seq, made, part)[layer]
                want = expect(
                    q[part], k, v, len(k), parents=np.array(parents[i]), window_left=window, **given
                )  # fmt: skip
                tolerances.assert_rows_close(found[part], want, BOUND)
    trees.cache.commit(step, paths=paths)
    for i, seq in enumerate(seqs):
        trees.rows[seq] = trees.joined(seq, made, ends[i] + np.array(paths[i]))
        assert trees.cache.length(seq) == lens[i] + len(paths[i])
    # Decoding goes on from the path.
    step = trees.cache.reserve(seqs, 1)
    made = trees.write(step)
    q = rows(rng, 2, HEADS)
    for layer, window in enumerate((-1, 6)):
        found = host(step.attention(layer, to(q)))
        for i, seq in enumerate(seqs):
            k, v = trees.joined(seq, made, [i])[layer]
            want = expect(q[i : i + 1], k, v, len(k), window_left=window)
            tolerances.assert_rows_close(found[i : i + 1], want, BOUND)
    trees.cache.rollback(step)
    trees.cache.check()


def test_rejected_trees_leave_nothing(target, to, rng):
    trees = Trees(rng, target, to)
    seq = trees.prompt(5)
    free = trees.cache.num_free
    for end in (
        lambda step: trees.cache.rollback(step),
        lambda step: trees.cache.commit(step, paths=[[]]),
    ):
        step = trees.cache.reserve([seq], 6, parents=[-1, 0, 1, 1, 0, -1])
        trees.write(step)
        end(step)
        assert trees.cache.length(seq) == 5
    assert trees.cache.num_free == free


def test_ids_of_a_path_are_found_by_others(target, to, rng):
    trees = Trees(rng, target, to)
    seq = trees.cache.add()
    step = trees.cache.reserve([seq], 6, parents=[-1, -1, 1, 2, 0, 3])
    trees.write(step)
    trees.cache.commit(step, token_ids=[10, 11, 12, 13, 14, 15], paths=[[1, 2, 3, 5]])
    found = [
        trees.cache.cached_len(trees.cache.add(ids))
        for ids in ([11, 12, 13, 15, 99], [10, 14, 12, 13, 99])
    ]
    assert found == [4, 0]


def test_rows_that_have_moved_are_not_moved_again(target, to, rng, monkeypatch):
    """A commit that fails after it has moved rows of a path wants the rows once more."""
    from numkv.caches.paged import cache as module

    trees = Trees(rng, target, to)
    step = trees.cache.reserve([trees.cache.add()], 3, parents=[-1, -1, 1])
    trees.write(step)

    def failing(*args):
        raise MemoryError("no more")

    with monkeypatch.context() as patch, pytest.raises(MemoryError, match="no more"):
        patch.setattr(module, "register", failing)
        trees.cache.commit(step, token_ids=[4, 5, 6], paths=[[1, 2]])
    with pytest.raises(numkv.NumkvError, match="append them, or roll the step back"):
        trees.cache.commit(step, token_ids=[4, 5, 6], paths=[[1, 2]])
    trees.cache.rollback(step)
    trees.cache.check()


def test_what_trees_refuse(target, to, rng):
    trees = Trees(rng, target, to)
    seq, other = trees.prompt(5), trees.prompt(2)
    cache = trees.cache
    with pytest.raises(IndexError, match="parents"):
        cache.reserve([seq], 3, parents=[-1, 1, 0])
    with pytest.raises(DimensionMismatch, match="cu_seqlens_q"):
        cache.reserve([seq], 3, parents=[-1, 0])
    step = cache.reserve([seq, other], [3, 2], parents=[-1, 0, 0, -1, 0])
    with pytest.raises(NumkvError, match="got none in layer 0"):
        cache.commit(step, paths=[[0], [0]])
    trees.write(step)
    for wrong in ([[0, 1, 2], []], [[1], []], [[0], [2]], [[0], [-1]], [[0, 0], []]):
        with pytest.raises(IndexError, match="paths"):
            cache.commit(step, paths=wrong)
    with pytest.raises(DimensionMismatch, match="paths"):
        cache.commit(step, paths=[[0]])
    for given in ({}, {"accepted": [1, 1]}, {"accepted": [1, 1], "paths": [[0], [0]]}):
        with pytest.raises(NotSupported, match="paths"):
            cache.commit(step, **given)
    q = to(rows(rng, 5, HEADS))
    with pytest.raises(NotSupported, match="mask"):
        step.attention(0, q, mask=to(numkv.tree_mask([-1] * 5)))
    with pytest.raises(NotSupported, match="tree"):
        step.attention_weights(0, q)
    with pytest.raises(NotSupported, match="tree"):
        cache.bind(HEADS).begin(step)
    cache.commit(step, paths=[[0, 2], [0, 1]])
    assert (cache.length(seq), cache.length(other)) == (7, 4)
    step = cache.reserve([seq], 1)
    with pytest.raises(NotSupported, match="paths"):
        cache.commit(step, paths=[[0]])
    # An array of records, which NumPy cannot compare with 0, is no rollback with or without trees.
    records = np.zeros(1, [("a", np.float32), ("b", np.int32)])
    with pytest.raises(UnsupportedDType, match="accepted"):
        cache.commit(step, accepted=records)
    cache.rollback(step)
    step = cache.reserve([seq], 2, parents=[-1, 0])
    trees.write(step)
    with pytest.raises(NotSupported, match="paths"):
        cache.commit(step, accepted=records)
    cache.rollback(step)
    assert cache.length(seq) == 7


def test_the_page_is_true():
    """The example of docs/visibility.md, and its drawing."""
    page = (Path(__file__).resolve().parents[2] / "docs" / "visibility.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    exec(compile(code, "visibility.md", "exec"), {})
    drawn = re.findall(r" d(\d)   ((?:[01] ?){4})\n", page)
    bits = numkv.tree_mask([-1, 0, 0, 1])
    assert [[int(i), *map(int, row.split())] for i, row in drawn] == [
        [i, *(int(bits[i, 0]) >> j & 1 for j in range(4))] for i in range(4)
    ]
