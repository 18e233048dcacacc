"""The oracle of multi-sequence caches: cells, and each rule written once, as it is defined.

A cell holds a position, a set of sequences, and a row of K and V in each layer. All else is computed from the cells
when it is needed, so that nothing can be out of date. It imports nothing of numkv.

Keys are float64 and are never rounded. `slack` is a bound on the error of keys that numkv moved: an L2 norm by head,
which a rotation does not change.
"""

import copy

import naive
import numpy as np

INFINITY = float("inf")


class Full(Exception):
    """There are fewer free cells than tokens."""


class Refused(Exception):
    """A key that has to move cannot."""


def num_cells(window, memory, max_sequences, capacity, max_batch, padding):
    """Return the number of cells, and how many positions eviction keeps; infinite for all."""
    window = INFINITY if window < 0 else window
    memory = window if memory is None else memory
    if memory < INFINITY and max_sequences > 1:
        memory = max(memory, window + 1)
    if memory >= capacity:
        memory = INFINITY
    per_sequence = capacity if memory == INFINITY else memory
    cells = max_sequences * per_sequence + (0 if memory == INFINITY else max_batch)
    return -(-cells // padding) * padding, memory


class Cells:
    """One cache; `window` -1 is unlimited, `chunk` 0 is none.

    `shift(key, offset)` rotates one key ``(num_kv_heads, head_dim)``; `loss(key)` is the error bound of storing it,
    ``(num_kv_heads,)``.
    """

    def __init__(
        self, max_sequences, capacity, max_batch, *, window=-1, memory=None, chunk=0, padding=1,
        shift=None, loss=None,
    ):  # fmt: skip
        self.chunk, self.padding = chunk, padding
        self.window = INFINITY if window < 0 else window
        self.shift, self.loss = shift, loss or (lambda key: 0)
        n, self.memory = num_cells(window, memory, max_sequences, capacity, max_batch, padding)
        self.positions = [0] * n
        self.sequences = [set() for _ in range(n)]
        self.keys, self.values, self.slack = {}, {}, {}  # by layer, as long as there are cells
        self.batch, self.chosen, self.shown, self.excepted = [], [], range(0), ()

    # -- what the cells say

    def holding(self, seq):
        """The cells of a sequence."""
        return [j for j, held in enumerate(self.sequences) if seq in held]

    def known(self):
        """All sequences that have cells."""
        return set().union(*self.sequences)

    def positions_of(self, seq):
        """Return the stored positions of a sequence, in order."""
        return sorted(self.positions[j] for j in self.holding(seq))

    def can_resume(self, seq, position):
        if self.memory == INFINITY:
            return True
        stored = self.positions_of(seq)
        if not stored:
            return False
        return max(0, position - self.window) >= stored[0] and position <= stored[-1] + 1

    def sees(self, row, cell):
        """Whether a token of the batch sees a cell."""
        position, seq = self.batch[row]
        other = self.positions[cell]
        if seq not in self.sequences[cell]:
            return False
        if other > position and row not in self.excepted:
            return False
        if self.chunk and other < position - position % self.chunk:
            return False
        return other >= position - self.window

    def mask(self):
        """``(batch, n)`` of 0 and -inf over the cells that are shown."""
        rows = range(len(self.batch))
        return np.array([[0 if self.sees(i, j) else -INFINITY for j in self.shown] for i in rows])

    # -- a pass

    def start_forward(self, positions, sequences, reserve=False):
        """Evict, choose cells, and say which of them are shown."""
        batch = [(int(p), int(s)) for p, s in zip(positions, sequences, strict=True)]
        if reserve:
            self.batch, self.excepted = batch, ()
            self.chosen, self.shown = None, range(len(self.positions))
            return
        own = {seq for _, seq in batch}
        lows = {s: min(p for p, t in batch if t == s) for s in own}
        for seq in self.known() - own:
            lows[seq] = self.positions_of(seq)[-1] + 1
        left = [
            {s for s in held if position >= lows[s] - self.memory}
            for position, held in zip(self.positions, self.sequences, strict=True)
        ]
        free = [j for j, held in enumerate(left) if not held]
        if len(free) < len(batch):
            raise Full
        self.sequences, self.batch, self.excepted = left, batch, ()
        reach = INFINITY if self.memory == INFINITY else self.window
        touched = [
            j for seq in own for j in self.holding(seq) if self.positions[j] >= lows[seq] - reach
        ]
        self.chosen = free[: len(batch)]
        for j, (position, seq) in zip(self.chosen, batch, strict=True):
            self.positions[j], self.sequences[j] = position, {seq}
        touched += self.chosen
        first, last = min(touched), max(touched)
        p = self.padding
        self.shown = range(first // p * p, -(-(last + 1) // p) * p)

    def allocate(self, layer, heads, k_dim, v_dim):
        """Make a layer's rows, of zeros, if it has none."""
        if layer not in self.keys:
            n = len(self.positions)
            self.keys[layer] = np.zeros((n, heads, k_dim))
            self.values[layer] = np.zeros((n, heads, v_dim))
            self.slack[layer] = np.zeros((n, heads))

    def put(self, layer, k, v):
        """Store rows, as the cache would return them; a reserved pass stores none."""
        self.allocate(layer, *k.shape[1:], v.shape[2])
        if self.chosen is not None:
            self.keys[layer][self.chosen] = k
            self.values[layer][self.chosen] = v
            self.slack[layer][self.chosen] = 0

    def get(self, layer):
        """Return keys, values, the keys' error bound, and the mask."""
        shown = slice(self.shown.start, self.shown.stop)
        rows = (self.keys, self.values, self.slack)
        return (*(x[layer][shown] for x in rows), self.mask())

    # -- between passes

    def remove(self, seq, begin, end=None):
        """Remove positions and close the gap; change nothing where that fails."""
        end = INFINITY if end is None else end
        own = self.holding(seq)
        moving = [j for j in own if self.positions[j] >= end] if end > begin else []
        if moving and (self.shift is None or any(len(self.sequences[j]) > 1 for j in moving)):
            raise Refused
        for j in own:
            if begin <= self.positions[j] < end:
                self.sequences[j].remove(seq)
        for j in moving:
            self.positions[j] += begin - end
            for layer, keys in self.keys.items():
                keys[j] = self.shift(keys[j], begin - end)
                self.slack[layer][j] += self.loss(keys[j])

    def copy_prefix(self, src, dst, length):
        for position, held in zip(self.positions, self.sequences, strict=True):
            held.discard(dst)
            if src in held and position < length:
                held.add(dst)


class Several:
    """Caches that make each change together, or not at all."""

    def __init__(self, *children):
        self.children = list(children)

    def every(self, name, *args, **options):
        new = copy.deepcopy(self.children)
        for child in new:
            getattr(child, name)(*args, **options)
        self.children[:] = new

    def start_forward(self, *args, **options):
        self.every("start_forward", *args, **options)

    def remove(self, *args):
        self.every("remove", *args)

    def copy_prefix(self, *args):
        self.every("copy_prefix", *args)

    def can_resume(self, seq, position):
        return all(child.can_resume(seq, position) for child in self.children)

    def known(self):
        return set().union(*(child.known() for child in self.children))


def attention(q, k, v, mask, *, sm_scale=None, logits_soft_cap=0.0, sinks=None):
    """Queries ``(batch, num_q_heads, head_dim)`` over rows ``(n, num_kv_heads, head_dim)`` that the
    mask shows; float64 ``(out, lse)``."""
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    batch, num_q_heads, head_dim = q.shape
    group = num_q_heads // k.shape[1]
    scale = 1 / np.sqrt(head_dim) if sm_scale is None else sm_scale
    out, lse = np.zeros((batch, num_q_heads, v.shape[2])), np.zeros((batch, num_q_heads))
    for i in range(batch):
        seen = np.flatnonzero(np.asarray(mask[i], np.float64) == 0)
        for h in range(num_q_heads):
            out[i, h], lse[i, h] = naive.attention_row(
                q[i, h], k[seen, h // group], v[seen, h // group], scale, logits_soft_cap,
                None if sinks is None else float(sinks[h]),
            )  # fmt: skip
    return out, lse


def as_stored(x, kind):
    """Rows as a cache of a kind gives them back, in float64."""
    if kind == "int8":
        return naive.int8_dequantise(*naive.int8_quantise(x))
    return naive.round_to(x, kind).astype(np.float64)


def rotate(key, offset, cos, sin, interleaved):
    """Return a key rotated by `offset` positions, backwards if it is negative."""
    turn = -1.0 if offset < 0 else 1.0
    row = abs(offset)
    return naive.rope(key, cos[row], turn * np.asarray(sin[row], np.float64), interleaved)


#: Half a unit in the last place of each float kind, and what float32 arithmetic adds.
STEP = {"fp64": 1e-6, "fp32": 1e-6, "fp16": 2.0**-11 + 1e-6, "bf16": 2.0**-8 + 1e-6}


def loss(kind):
    """Return the error bound of storing a key computed in float32: an L2 norm by head."""

    def of(key):
        if kind == "int8":  # half a scale in every element
            largest = np.abs(key).max(axis=-1)
            return np.sqrt(key.shape[-1]) * largest * 1.1 / 254 + 1e-9
        return STEP[kind] * np.linalg.norm(key, axis=-1) * 1.01 + 1e-7

    return of
