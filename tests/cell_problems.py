"""A multi-sequence cache of numkv and its oracle, side by side: every call goes to both, every answer is compared."""

import contextlib

import naive
import naive_cells
import numpy as np
import pytest
import tolerances

import numkv
from numkv import targets


def draw(mask):
    """A mask as text, a group for each row: ``0`` visible, ``x`` minus infinity."""
    mask = np.asarray(mask).astype(np.float64)
    assert np.all((mask == 0) | (mask == -np.inf))
    return " / ".join("".join("0" if x == 0 else "x" for x in row) for row in mask)


def plus(target):
    """The upstream tests' shift function: every element of a key plus the offset, on the host."""
    where = targets.get(target)

    def shift(layer, keys, offsets):
        rows = where.to_host(keys)
        moved = rows.astype(np.float64) + where.to_host(offsets)[:, None, None]
        return where.asarray(moved.astype(rows.dtype))

    return shift


def plus_one(key, offset):
    """The same for the oracle."""
    return key + offset


class Pair:
    """A cache, initialised, and the oracle's cells of each of its children.

    `types` says which child a layer belongs to, where there are several; with `switch`, ``set_layer_type``
    tells the wrapper so.
    """

    def __init__(
        self, cache, *cells, target="cpu", k_kind="fp32", v_kind=None, permuted_v=False,
        mask_dtype="fp32", types=None, switch=False,
    ):  # fmt: skip
        self.cache, self.model = cache, naive_cells.Several(*cells)
        self.k_kind, self.v_kind = k_kind, v_kind or k_kind
        self.permuted_v, self.mask_dtype = permuted_v, mask_dtype
        self.types, self.switch = types, switch
        self.to, self.host = targets.get(target).asarray, targets.get(target).to_host
        self.passing = False  # whether a pass is on, and nothing was changed since it began
        self.sequences = set()

    def cells(self, layer):
        """The oracle of a layer; from here on calls go to its child."""
        child = self.types[layer] if self.types else 0
        if self.switch:
            self.cache.set_layer_type(child)
        return self.model.children[child]

    def layers(self):
        """All layers that have been put."""
        return sorted(set().union(*(child.keys for child in self.model.children)))

    # -- nothing has changed

    def seen(self):
        """Return all that can be seen without a new pass."""
        answers = [
            self.cache.can_resume(seq, position)
            for seq in sorted(self.sequences)
            for position in range(12)
        ]
        shown = []
        if self.passing:
            for layer in self.layers():
                self.cells(layer)
                k, v, mask = (self.host(x) for x in self.cache.get(layer))
                shown.append([(x.shape, x.dtype, x.tobytes()) for x in (k, v, mask)])
        return answers, shown

    @contextlib.contextmanager
    def refused(self, error, match=None):
        """Assert that a call fails and changes nothing that can be seen."""
        before = self.seen()
        with pytest.raises(error, match=match):
            yield
        assert self.seen() == before

    # -- calls

    def start_forward(self, positions, sequences, reserve=False):
        """Begin a pass; return whether there was room. If there was none, assert that nothing changed."""
        batch = numkv.Batch(positions, sequences)
        try:
            self.model.start_forward(positions, sequences, reserve=reserve)
        except naive_cells.Full:
            with self.refused(numkv.CacheFull):
                self.cache.start_forward(batch, reserve=reserve)
            return False
        self.cache.start_forward(batch, reserve=reserve)
        self.passing = True
        if not reserve:
            self.sequences |= set(sequences)
        return True

    def put(self, layer, k, v):
        """Rows of K and V for the batch, NumPy arrays."""
        self.cells(layer).put(
            layer,
            naive_cells.as_stored(k, self.k_kind),
            naive_cells.as_stored(v, self.v_kind),
        )
        self.cache.put(layer, self.to(k), self.to(v))

    def change(self, name, *args):
        """``remove`` or ``copy_prefix``; whether the oracle allowed it."""
        try:
            getattr(self.model, name)(*args)
        except naive_cells.Refused:
            with self.refused(numkv.NotSupported):
                getattr(self.cache, name)(*args)
            return False
        getattr(self.cache, name)(*args)
        self.passing = False
        if name == "copy_prefix":
            self.sequences |= {args[0], args[1]}
        return True

    def set_causal(self, layer, except_indices=()):
        """The child of a layer lets some of the batch see what comes after them."""
        cache = self.cache
        if self.types:
            cache.set_layer_type(self.types[layer])
            cache = cache.underlying_cache
        self.cells(layer).excepted = tuple(except_indices)
        cache.set_causal(except_indices)

    # -- comparisons

    def check(self, layer):
        """Compare ``get`` with the oracle; return its result in host memory, values token-major."""
        cells = self.cells(layer)
        if layer not in cells.keys:
            with pytest.raises(IndexError):
                self.cache.get(layer)
            return None
        k, v, mask = (self.host(x) for x in self.cache.get(layer))
        want_k, want_v, slack, want_mask = cells.get(layer)
        assert k.dtype == numkv.kind(self.k_kind).dtype
        assert v.dtype == numkv.kind(self.v_kind).dtype
        assert mask.dtype == naive.DTYPES[self.mask_dtype]
        assert np.array_equal(mask.astype(np.float64), want_mask)
        if self.permuted_v:
            assert v.shape == (*want_v.shape[1:], len(want_v))
            v = v.transpose(2, 0, 1)
        for got, want, kind, off in (
            (k, want_k, self.k_kind, slack), (v, want_v, self.v_kind, np.zeros(slack.shape)),
        ):  # fmt: skip
            assert got.shape == want.shape
            error = np.linalg.norm(got.astype(np.float64) - want, axis=-1)
            if kind == "int8":  # a code times a scale is rounded to float32
                off = off + 1e-6 * np.linalg.norm(want, axis=-1)
            assert np.all(error <= off)
        return k, v, mask

    def attends(self, layer, q, **options):
        """Compare ``decode_attention`` with attention over the rows that ``get`` shows."""
        k, v, mask = self.check(layer)
        arrays = {n: self.to(x) for n, x in options.items() if isinstance(x, np.ndarray)}
        got = self.cache.decode_attention(layer, self.to(q), return_lse=True, **(options | arrays))
        out, lse = (self.host(x) for x in got)
        want, want_lse = naive_cells.attention(q, k, v, mask, **options)
        kinds = self.k_kind, self.v_kind
        storage = tolerances.widest(*kinds, self.k_kind, self.v_kind)
        kind_of_q = next(n for n, d in naive.DTYPES.items() if d == q.dtype)
        assert out.dtype == q.dtype
        assert lse.dtype == np.float32
        tolerances.assert_rows_close(out, want, tolerances.attention(storage, kind_of_q))
        bound = tolerances.INTEGERS if storage in tolerances.QUANTISED else tolerances.LSE
        tolerances.assert_lse_close(lse, want_lse, bound)
        return out

    def probe(self, most=4):
        """Compare every cell, by reserved passes, which change nothing: they show all cells to all tokens."""
        tokens = [
            (position, seq)
            for seq in sorted(self.model.known() | self.sequences)
            for position in sorted(
                {p for child in self.model.children for p in child.positions_of(seq)} or {0}
            )
        ]
        for i in range(0, len(tokens), most):
            positions, sequences = zip(*tokens[i : i + most], strict=True)
            assert self.start_forward(list(positions), list(sequences), reserve=True)
            for layer in self.layers():
                self.check(layer)
