"""A model in plain NumPy of caches with keys by channel: it keeps full rows, and derives all codes from them."""

import functools

import naive
import naive_sparse
import numpy as np
import reference
import tolerances

TOKENS = naive.CHANNEL_TOKENS


def close(found, wanted, limit=2e-4):
    """Kernels take queries and weights over codes as 16-bit integers."""
    limit = limit if reference.stands_in() else max(limit, tolerances.INTEGERS)
    assert np.linalg.norm(found - wanted) < limit * max(np.linalg.norm(wanted), 1e-3)


class Sequence:
    """Rows of a sequence ``(n, heads, dim)``: the codes made of them, and the rows that are read in full."""

    def __init__(self, k, v, kind, full_v=None, full_from=0, sinks=0):
        self.k, self.v, self.kind, self.full_from, self.sinks = k, v, kind, full_from, sinks
        self.full_v = v if full_v is None else full_v

    @classmethod
    def empty(cls, heads, dim, kind, sinks=0):
        return cls(*np.zeros((2, 0, heads, dim), np.float32), kind, sinks=sinks)

    def __len__(self):
        return len(self.k)

    def extended(self, k, v):
        k, of_v, full_v = (np.concatenate(x) for x in ((self.k, k), (self.v, v), (self.full_v, v)))
        return self._replaced(k, of_v, full_v)

    def _replaced(self, k, v, full_v, full_from=None):
        full_from = self.full_from if full_from is None else full_from
        return Sequence(k, v, self.kind, full_v, full_from, self.sinks)

    @functools.lru_cache(maxsize=4)  # noqa: B019
    def read(self):
        """K and V where they are not read in full: codes, but for first tokens that are kept in full."""
        of_k, of_v = (x.copy() for x in self.coded())
        n = min(self.sinks, len(self))
        of_k[: min(n, len(of_k))], of_v[:n] = self.k[: min(n, len(of_k))], self.full_v[:n]
        return of_k, of_v

    @functools.lru_cache(maxsize=4)  # noqa: B019 - a sequence never changes, and every query reads it
    def coded(self):
        """K and V decoded from their codes, in float64: of whole groups alone."""
        n = len(self) // TOKENS * TOKENS
        of = self.k[:n].reshape(-1, TOKENS, *self.k.shape[1:]).swapaxes(1, 2)
        words, shared = naive.channel_group(of, self.kind)
        k = naive.channel_values(words, shared[..., None, :], self.kind)
        v = naive.dequantise(*naive.quantise(self.v, self.kind.partition("_")[0]))
        return k.swapaxes(1, 2).reshape(n, *self.k.shape[1:]), v

    def truncated(self, length):
        """The first tokens. A cut group has lost its full rows: it is read by its codes until it is complete again."""
        kept, gone = length // TOKENS * TOKENS, (len(self) - 1) // TOKENS * TOKENS
        k, v, full_v = self.k[:length].copy(), self.v[:length], self.full_v[:length].copy()
        full_from = min(self.full_from, length)
        if max(length - 1, 0) < gone or self.full_from > kept:
            full_from = kept
            of_k, of_v = self.read()
            k[kept:], full_v[kept:] = of_k[kept:length], of_v[kept:length]
        return self._replaced(k, v, full_v, full_from)

    def compacted(self, keep, turn=None):
        """The tokens of some positions: groups before the first that moves stay, rows of others are taken as they read.

        ``turn(k, offsets)`` moves keys.
        """
        keep = np.asarray(keep, np.int64)
        moved = np.flatnonzero(keep != np.arange(len(keep)))
        begin = (int(moved[0]) if len(moved) else len(keep)) // TOKENS * TOKENS
        edge = max((len(self) - 1) // TOKENS * TOKENS, min(self.full_from, len(self)))
        of_k, of_v = self.read()
        k, v = (
            np.concatenate([x[:edge], y[edge:]])[keep[begin:]].astype(np.float32)
            for x, y in ((of_k, self.k), (of_v, self.full_v))
        )
        if turn is not None:
            k = turn(k, np.arange(begin, len(keep)) - keep[begin:])
        return self.truncated(begin).extended(k, v)

    def own(self, position):
        """The first token that a query at a position sees in full, but for first tokens that are kept."""
        return max(position // TOKENS * TOKENS, min(self.full_from, len(self) // TOKENS * TOKENS))

    def seen(self, position, window=-1):
        """K and V that a query at a position sees: its own group in full, those before as codes."""
        own, first = self.own(position), max(0, position - window) if window >= 0 else 0
        rows = zip(self.read(), (self.k, self.full_v), strict=True)
        return [np.concatenate([x[:own], y[own:]])[first : position + 1] for x, y in rows]

    def attended_sparsely(self, q, positions, size, most):
        """Attention of queries ``(n, q heads, dim)`` to so many blocks, and to tokens in full."""
        found = []
        for x, position in zip(q, positions, strict=True):
            end = min(self.own(position), position + 1)
            coded = self.coded()[0][:end], min(self.sinks, end)
            found.append(
                naive_sparse.attention(x, *self.seen(position), size, most, coded=coded)[0]
            )
        return np.stack(found)

    def _weights(self, q, positions, window):
        """Of queries that read the same rows: their numbers, weights ``(heads, n, group, tokens)`` and V of these."""
        heads, dim, positions = self.k.shape[1], self.k.shape[2], np.asarray(positions)
        owns = np.array([self.own(int(x)) for x in positions])
        for own in np.unique(owns):
            at = np.flatnonzero(owns == own)
            k, v = self.seen(int(positions[at].max()))
            tokens, here = np.arange(len(k)), positions[at, None]
            hidden = (tokens > here) | ((tokens < here - window) if window >= 0 else False)
            query = q[at].astype(float).reshape(len(at), heads, -1, dim).swapaxes(0, 1)
            scores = query @ k.transpose(1, 2, 0)[:, None] * dim**-0.5
            np.copyto(scores, -np.inf, where=hidden[:, None])
            scores -= scores.max(axis=3, keepdims=True)
            np.copyto(scores, 0, where=hidden[:, None])  # NumPy takes thrice as long for -inf
            weights = np.exp(scores, out=scores)
            np.copyto(weights, 0, where=hidden[:, None])
            weights /= weights.sum(axis=3, keepdims=True)
            yield at, weights, v

    def attended(self, q, positions, window=-1):
        """Attention of queries ``(n, q heads, dim)``."""
        out = np.zeros((*q.shape[:2], self.v.shape[2]))
        for at, weights, v in self._weights(q, positions, window):
            found = weights @ v.swapaxes(0, 1)[:, None]
            out[at] = found.swapaxes(0, 1).reshape(len(at), *out.shape[1:])
        return out

    def mass(self, q, window=-1):
        """Attention ``(heads, n)`` that tokens get from the queries of the last ones, in float64."""
        n = len(self)
        found = np.zeros((self.k.shape[1], n))
        for _, weights, _ in self._weights(q, range(n - len(q), n), window):
            found[:, : weights.shape[3]] += weights.sum(axis=(1, 2))
        return found


def _angles(offsets, dim):
    angles = np.asarray(offsets)[:, None] * 10000.0 ** (-np.arange(dim // 2) / (dim // 2))
    return np.cos(angles), np.sin(angles)


def turned(k, offsets):
    """Keys at other positions: half-split pairs."""
    half = k.shape[-1] // 2
    cos, sin = (x[:, None] for x in _angles(offsets, 2 * half))
    a, b = k[..., :half], k[..., half:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1).astype(np.float32)


def shift_tables(dim, positions=400):
    """Cosines and sines of so many positions, for `numkv.rope_shift`."""
    return _angles(np.arange(positions), dim)


#: What a compaction may keep of so many tokens.
KEEPS = {
    "nothing": lambda n: [],
    "all": range,
    "the first ones": lambda n: range(n // 2),
    "first and recent": lambda n: sorted({*range(4), *range(n - 30, n)}),
    "all but one": lambda n: [*range(70), *range(71, n)] if n > 70 else [0, 2],
    "every second": lambda n: range(0, n, 2),
    "the newest": lambda n: [n - 1],
}
