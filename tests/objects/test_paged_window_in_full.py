"""Newest tokens of a `PagedKVCache` in full precision: each layer twice, in codes and, within a window, in floats."""

import naive
import numpy as np
import tolerances

import numkv

LAYERS, HEADS, Q_HEADS, DIM, WINDOW = 2, 2, 4, 32, 5


class Twice:
    """Sequences of rows in lists, and a cache with layer i in codes and layer LAYERS + i in floats."""

    def __init__(self, kind, target, to, host):
        self.kind, self.to, self.host = kind, to, host
        self.cache = numkv.PagedKVCache(
            2 * LAYERS, HEADS, DIM, num_blocks=64, block_size=4, target=target,
            kind=[kind] * LAYERS + ["fp32"] * LAYERS, windows=[-1] * LAYERS + [WINDOW - 1] * LAYERS,
        )  # fmt: skip
        self.rows = {}
        self.rng = np.random.default_rng(0)

    def draw(self, *shape):
        return self.rng.standard_normal(shape).astype(np.float32)

    def forward(self, sequences, counts, commit=True):
        """Append rows and attend; what came out, and what should have."""
        cache, to, total = self.cache, self.to, sum(counts)
        step = cache.reserve(sequences, counts)
        end = np.maximum(self.host(step.positions).astype(np.int64) + 1 - WINDOW, 0)
        older = np.stack([np.zeros_like(end), end], -1)
        new, found, expected = {}, [], []
        for layer in range(LAYERS):
            k, v = self.draw(2, total, HEADS, DIM)
            q = self.draw(total, Q_HEADS, DIM)
            for twin in (layer, LAYERS + layer):
                step.append(twin, to(k), to(v))
            codes = step.attention(layer, to(q), ranges=to(older), return_lse=True)
            recent = step.attention(LAYERS + layer, to(q), return_lse=True)
            out, _ = numkv.merge_states(*codes, *recent)
            found.append(self.host(out))
            expected.append(self.reference(layer, sequences, counts, k, v, q, new))
        if commit:
            cache.commit(step)
            for key, x in new.items():
                self.rows[key] = x
        else:
            cache.rollback(step)
        return np.array(found), np.array(expected)

    def reference(self, layer, sequences, counts, k, v, q, new):
        out, first = np.zeros(q.shape), 0
        for seq, n in zip(sequences, counts, strict=True):
            part = slice(first, first + n)
            before = self.rows.get((seq, layer), (np.zeros((0, HEADS, DIM), np.float32),) * 2)
            both = [np.concatenate([x, y[part]]) for x, y in zip(before, (k, v), strict=True)]
            new[seq, layer] = both
            for t in range(n):
                seen = len(both[0]) - n + t + 1
                old = np.arange(seen) <= seen - 1 - WINDOW
                for h in range(Q_HEADS):
                    sides = []
                    for x in both:
                        exact = x[:seen, h // 2]
                        codes = naive.dequantise(*naive.quantise(exact, self.kind))
                        sides.append(np.where(old[:, None], codes, exact.astype(np.float64)))
                    row = q[first + t, h].astype(np.float64)
                    out[first + t, h] = naive.attention_row(row, *sides, DIM**-0.5, 0, None)[0]
            first += n
        return out


def close(found, expected):
    # Far less than what it makes to read a window from codes.
    return np.linalg.norm(found - expected) < tolerances.INTEGERS * np.linalg.norm(expected)


def test_against_float64(target, to, host):
    twice = Twice("int4", target, to, host)
    cache = twice.cache
    a, b = cache.add(), cache.add()
    assert close(*twice.forward([a, b], [7, 2]))
    for _ in range(2):
        assert close(*twice.forward([a, b], [1, 1]))
    # A fork, drafts that are given up, and texts that go on differently.
    c = cache.fork(a)
    twice.rows |= {(c, layer): twice.rows[a, layer] for layer in range(LAYERS)}
    assert close(*twice.forward([c, b], [3, 1], commit=False))
    assert close(*twice.forward([a, c], [2, 1]))
    for seq in (a, b, c):
        cache.remove(seq)
    cache.check()


def test_the_window_takes_few_blocks():
    """What a sequence keeps in floats is bounded, however long it is."""
    found = []
    for windows in ([-1, WINDOW - 1], [-1, -1]):
        cache = numkv.PagedKVCache(
            2, HEADS, DIM, num_blocks=400, block_size=4, kind=["int4", "fp32"], windows=windows
        )
        seq, rows = cache.add(), np.ones((8, HEADS, DIM), np.float32)
        used = []
        for _ in range(8):
            step = cache.reserve([seq], 8)
            for layer in range(2):
                step.append(layer, rows, rows)
            cache.commit(step)
            used.append(cache.stats().pool.used)
        found.append(np.diff(used[2:]))
    # 8 tokens are 2 blocks of codes; 2 of floats are taken, and with the window as many given back.
    assert (found[0] == 2).all()
    assert (found[1] == 4).all()
