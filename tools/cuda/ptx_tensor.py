"""Instructions of whole warps, and asynchronous copies, for `ptx_machine`.

These are ``mma``, ``ldmatrix``, ``movmatrix`` and ``cp.async``.

A copy's bytes arrive in shared memory when the thread that started it has waited for its group. Until then no thread
may access its target, and earlier accesses of others must precede a barrier. Products are exact, and rounded to float32
once for each instruction; a GPU rounds more often.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from tools.cuda.ptx_memory import GlobalMemory, SharedMemory
from tools.cuda.ptx_program import Program, PtxError

__all__ = ["TensorInstructions", "fma_pair", "from_pair", "to_pair"]


class _Copies(NamedTuple):
    """The copies that threads have started by one instruction."""

    lanes: Any
    group: Any  #: of each thread: how many it had committed before
    words: Any  #: of shared memory ``(thread, word)``, in grains
    values: Any  #: ``(thread, bytes)``


class TensorInstructions:
    """A part of `ptx_machine`'s batch of blocks."""

    memory: GlobalMemory
    shared: SharedMemory
    program: Program
    result: Any
    lanes: Any
    total: int

    def _addresses(self, base: Any, offset: int, mask: Any) -> tuple[Any, Any]:
        raise NotImplementedError

    def start_copies(self) -> None:
        """Drop the copies of earlier blocks."""
        self._pending: list[_Copies] = []
        self._committed = np.zeros(self.total, np.int64)

    def copy_async(
        self, to: Any, to_offset: int, source: Any, offset: int, whole: int, size: Any, mask: Any, at: int
    ) -> None:  # fmt: skip
        """``cp.async`` of `whole` bytes, 16 or 4, of which the first `size` are read and the others zeros."""
        place, lanes = self._addresses(to, to_offset, mask)
        a, _ = self._addresses(source, offset, mask)
        sizes = np.broadcast_to(np.asarray(size), (self.total,))[lanes].astype(np.int64)
        values = np.zeros((len(lanes), whole), np.uint8)
        for n in np.unique(sizes):
            if n not in (0, 4, 8, 16) or n > whole:
                raise PtxError(f"copies of {n} bytes are not known: {self.program.code[at].text}")
            mine = sizes == n
            if n and (a[mine] & np.uint64(whole - 1)).any():
                raise self.result.problems.stop(
                    "misaligned access to global memory", at, f"a copy of {whole} bytes"
                )
            if n:
                parts = self.memory.load(a[mine], 4, int(n) // 4, at)
                values[mine, :n] = np.stack(parts, axis=1).view(np.uint8)
        words = self.shared.copied_to(place, whole, lanes, at)
        self._pending.append(_Copies(lanes, self._committed[lanes], words, values))

    def commit_copies(self, mask: Any) -> None:
        """``cp.async.commit_group``."""
        self._committed[slice(None) if mask is None else mask] += 1

    def wait_for_copies(self, groups: int, mask: Any) -> None:
        """``cp.async.wait_group``: the waiting threads write the arriving bytes."""
        waits = np.ones(self.total, np.bool_) if mask is None else mask
        left = []
        for copies in self._pending:
            arrives = waits[copies.lanes] & (copies.group < self._committed[copies.lanes] - groups)
            if arrives.any():
                self.shared.arrive(
                    copies.words[arrives], copies.values[arrives], copies.lanes[arrives]
                )
            if not arrives.all():
                left.append(_Copies(*(part[~arrives] for part in copies)))
        self._pending = left

    def _whole_warps(self, mask: Any, at: int) -> Any:
        """Return the active threads, one warp a row; they must form whole warps."""
        if mask is None:
            return self.lanes.reshape(-1, 32)
        warps = mask.reshape(-1, 32)
        here = warps.all(1)
        if (warps.any(1) & ~here).any():
            raise self.result.problems.stop(
                "a warp's threads do not meet", at, self.program.code[at].text
            )
        return self.lanes.reshape(-1, 32)[here]

    def load_matrices(
        self, address: Any, offset: int, count: int, trans: bool, mask: Any, at: int
    ) -> list[Any]:
        """``ldmatrix``: a word of each of `count` matrices, for all threads."""
        warps = self._whole_warps(mask, at)
        a, _ = self._addresses(address, offset, None)
        readers = warps[:, : 8 * count]
        parts = self.shared.load(a[readers.reshape(-1)], 4, 4, readers.reshape(-1), at)
        rows = np.stack(parts, axis=1).reshape(len(warps), count, 8, 4)  # [warp, matrix, row, word]
        if trans:
            halves = rows.view(np.uint16).swapaxes(2, 3)
            rows = np.ascontiguousarray(halves).view(np.uint32)
        found = []
        for i in range(count):
            words = np.zeros(self.total, np.uint32)
            words[warps.reshape(-1)] = rows[:, i].reshape(-1)
            found.append(words)
        return found

    def transpose_matrix(self, word: Any, mask: Any, at: int) -> Any:
        """``movmatrix``: an 8 x 8 matrix of each warp, turned."""
        warps = self._whole_warps(mask, at)
        pairs = np.ascontiguousarray(np.broadcast_to(word, (self.total,))[warps]).view(np.uint16)
        turned = np.ascontiguousarray(pairs.reshape(-1, 8, 8).swapaxes(1, 2))
        found = np.zeros(self.total, np.uint32)
        found[warps] = turned.reshape(len(warps), 64).view(np.uint32)
        return found

    def multiply_matrices(
        self, of: str, a: list[Any], b: list[Any], c: list[Any], mask: Any, at: int
    ) -> list[Any]:
        """``mma.m16n8k16`` of bf16 or f16: the four of D, for all threads."""
        warps = self._whole_warps(mask, at)

        def tile(word: Any) -> Any:
            """An 8 x 8 matrix for each warp: thread (g, t) has elements 2t and 2t + 1 of row g."""
            pairs = from_pair(of, np.broadcast_to(word, (self.total,))[warps])
            return pairs.reshape(-1, 8, 8).astype(np.float64)

        left = np.concatenate(
            [np.concatenate([tile(a[i]), tile(a[i + 2])], axis=2) for i in (0, 1)], axis=1
        )
        right = np.concatenate([tile(word) for word in b], axis=2).swapaxes(1, 2)
        sums = np.stack([np.broadcast_to(x, (self.total,))[warps] for x in c], axis=-1)
        product = (left @ right).reshape(-1, 2, 8, 4, 2)  # [warp, half, g, t, element]
        product = product.transpose(0, 2, 3, 1, 4).reshape(sums.shape)
        found = []
        for i in range(4):
            values = np.zeros(self.total, np.float32)
            values[warps] = product[..., i] + sums[..., i]
            found.append(values)
        return found


def _to_odd(x: Any) -> Any:
    """Round float64 to float32, to odd, so that a second rounding to fewer bits equals a single rounding."""
    near = x.astype(np.float32)
    near = np.where(abs(near) > abs(x), np.nextafter(near, np.float32(0)), near)
    inexact = (near != x) & np.isfinite(x)
    return (near.view(np.uint32) | inexact).astype(np.uint32).view(np.float32)


def _bf16(x: Any) -> Any:
    bits = x.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(x), np.uint32(0x7FFF), rounded).astype(np.uint16)


def to_pair(of: str, low: Any, high: Any) -> Any:
    """Two float32 as the words of two bf16 or f16, the first in the low half."""
    low, high = np.broadcast_arrays(low, high)
    words = [
        _bf16(x) if of == "bf16" else x.astype(np.float16).view(np.uint16) for x in (low, high)
    ]
    return words[0].astype(np.uint32) | (words[1].astype(np.uint32) << np.uint32(16))


def from_pair(of: str, word: Any) -> Any:
    """Words of two bf16 or f16 as float32; the last axis is 2."""
    halves = np.ascontiguousarray(word)[..., None].view(np.uint16)
    if of == "bf16":
        return (halves.astype(np.uint32) << np.uint32(16)).view(np.float32)
    return halves.view(np.float16).astype(np.float32)


def fma_pair(of: str, a: Any, b: Any, c: Any) -> Any:
    """``fma.rn`` of words of two bf16 or f16."""
    a, b, c = (from_pair(of, x).astype(np.float64) for x in np.broadcast_arrays(a, b, c))
    exact = a * b + c
    if of == "bf16":
        return to_pair(of, *np.moveaxis(_to_odd(exact), -1, 0))
    rounded = np.ascontiguousarray(exact.astype(np.float16))
    return rounded.view(np.uint32)[..., 0]
