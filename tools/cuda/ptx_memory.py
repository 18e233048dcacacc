"""The memory of an interpreted kernel, with the threads that accessed it since the last barrier.

Global memory is the stub driver's, so addresses are those of the process; an access must lie within one allocation.
Shared memory and registers exist once for each running block. Every word of shared memory records the last thread that
wrote it, and the threads that read it since the block's last barrier: conflicting accesses are a race. Uninitialised
reads are errors too.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np

from tools.cuda.ptx_program import SHARED_START, PtxError

__all__ = ["GlobalMemory", "LocalMemory", "Problems", "SharedMemory"]

Ints = np.ndarray[Any, np.dtype[np.int64]]
#: The writer of a word that threads change by atomic instructions.
_MANY = -(1 << 40)


class Problems:
    """Errors of a kernel by kind, with the first places of each; notes are not errors."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.notes: Counter[str] = Counter()
        self.where: dict[str, list[tuple[int, str]]] = {}

    def add(self, kind: str, at: int, detail: object) -> None:
        """Record a problem at an instruction."""
        self.counts[kind] += 1
        places = self.where.setdefault(kind, [])
        if len(places) < 4:
            places.append((at, str(detail)))

    def stop(self, kind: str, at: int, detail: object) -> PtxError:
        """Record a fatal problem, and return the error to raise."""
        self.add(kind, at, detail)
        return PtxError(f"{kind} at instruction {at}: {detail}")


class GlobalMemory:
    """Allocations of the driver.

    Parameters
    ----------
    find : function
        Returns the first address and the bytes of an address's allocation, or None.
    problems : Problems
        Records errors.
    """

    def __init__(self, find: Callable[[int], tuple[int, int] | None], problems: Problems) -> None:
        self._find, self.problems = find, problems
        self._views: dict[int, tuple[int, dict[int, Any]]] = {}
        self._last: dict[int, tuple[int, int, dict[int, Any]]] = {}

    def _allocation(self, address: int, at: int) -> tuple[int, int, dict[int, Any]]:
        found = self._find(address)
        if found is None:
            raise self.problems.stop("access outside of all memory", at, hex(address))
        base, size = found
        if base not in self._views or self._views[base][0] != size:
            raw = (
                np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(base))
                if size
                else np.zeros(0, np.uint8)
            )
            views = {n: raw[: size // n * n].view(f"u{n}") for n in (1, 2, 4, 8)}
            self._views[base] = size, views
        return base, size, self._views[base][1]

    def _parts(self, a: Any, total: int, at: int) -> list[tuple[Any, int, dict[int, Any]]]:
        """Return threads by allocation: a mask (None for all), its base and its views."""
        if (a & np.uint64(total - 1)).any():
            raise self.problems.stop(
                "misaligned access to global memory", at, f"{hex(int(a.max()))}, {total} bytes"
            )
        low, high = int(a.min()), int(a.max())
        base, size, views = self._last.get(at, (1, 0, {}))
        if not (base <= low and high + total <= base + size):
            base, size, views = self._last[at] = self._allocation(low, at)
        if base <= low and high + total <= base + size:
            return [(None, base, views)]
        parts, left = [], np.ones(a.shape, np.bool_)
        while left.any():
            base, size, views = self._allocation(int(a[left].min()), at)
            mine = left & (a >= np.uint64(base)) & (a < np.uint64(base + size))
            if int(a[mine].max()) + total > base + size:
                raise self.problems.stop(
                    "access past the end of an allocation", at, f"{size} bytes"
                )
            parts.append((mine, base, views))
            left &= ~mine
        return parts

    def load(self, a: Any, size: int, count: int, at: int) -> list[Any]:
        """Return the values of `count` words of `size` bytes at addresses."""
        parts = self._parts(a, size * count, at)
        if parts[0][0] is None:
            _, base, views = parts[0]
            index = ((a - np.uint64(base)) // np.uint64(size)).astype(np.int64)
            return [views[size][index + k] for k in range(count)]
        found = [np.zeros(a.shape, f"u{size}") for _ in range(count)]
        for mine, base, views in parts:
            index = ((a[mine] - np.uint64(base)) // np.uint64(size)).astype(np.int64)
            for k in range(count):
                found[k][mine] = views[size][index + k]
        return found

    def store(self, a: Any, size: int, values: list[Any], at: int) -> None:
        """Store words at addresses."""
        if len(a) > 1:
            self._conflicts(a, values, at)
        for mine, base, views in self._parts(a, size * len(values), at):
            chosen = slice(None) if mine is None else mine
            index = ((a[chosen] - np.uint64(base)) // np.uint64(size)).astype(np.int64)
            for k, value in enumerate(values):
                views[size][index + k] = value[chosen]

    def _conflicts(self, a: Any, values: list[Any], at: int) -> None:
        """Record threads that store different values to one address by one instruction."""
        order = np.argsort(a, kind="stable")
        same = a[order][1:] == a[order][:-1]
        if not same.any():
            return
        for value in values:
            if (same & (value[order][1:] != value[order][:-1])).any():
                self.problems.add(
                    "different values stored to one place at once", at, "global memory"
                )
                return


class SharedMemory:
    """Shared memory of the blocks that run at once.

    Parameters
    ----------
    blocks, threads : int
        Blocks, and threads of each.
    size : int
        Bytes of a block, from address 0 on; those below `SHARED_START` are unused.
    grain : int
        Bytes of a tracked word: the smallest access of the kernel.
    problems : Problems
        Records errors.
    """

    def __init__(
        self, blocks: int, threads: int, size: int, grain: int, problems: Problems
    ) -> None:
        self.size = -(-size // 16) * 16
        self.problems, self.grain, self.threads = problems, grain, threads
        self.bytes = np.full(blocks * self.size, 0xCD, np.uint8)
        self.views = {n: self.bytes.view(f"u{n}") for n in (1, 2, 4, 8)}
        words = blocks * self.size // grain
        self.written_in, self.read_in = (np.full(words, -1, np.int64) for _ in range(2))
        self.writer, self.first_reader, self.last_reader = (
            np.full(words, -1, np.int64) for _ in range(3)
        )
        # Barriers of single warps order a word's accesses within that warp.
        self.written_after, self.read_after = (np.zeros(words, np.int64) for _ in range(2))
        self.set = np.zeros(words, np.bool_)
        self.awaited = np.zeros(words, np.bool_)  #: a copy to it is under way
        self.epoch = np.zeros(
            blocks * threads, np.int64
        )  #: of each thread: barriers that it has passed
        self.warp_epoch = np.zeros(blocks * threads, np.int64)
        self.block_of = np.repeat(np.arange(blocks, dtype=np.int64), threads)
        self.limit = size

    def _index(self, a: Any, size: int, total: int, lanes: Ints, at: int) -> Ints:
        offsets = a.astype(np.int64)
        if (offsets & (total - 1)).any():
            raise self.problems.stop(
                "misaligned access to shared memory", at, f"{int(offsets.max())}, {total} bytes"
            )
        if (offsets < SHARED_START).any() or (offsets + total > self.limit).any():
            beyond = int(offsets.max()) - SHARED_START
            raise self.problems.stop(
                "access outside of shared memory",
                at,
                f"byte {beyond} of {self.limit - SHARED_START}",
            )
        return offsets + self.block_of[lanes] * self.size

    def load(self, a: Any, size: int, count: int, lanes: Ints, at: int) -> list[Any]:
        """Values of `count` words of `size` bytes at addresses, for some threads."""
        place = self._index(a, size, size * count, lanes, at)
        for step in range(max(1, size * count // self.grain)):
            self._reads(place // self.grain + step, lanes, at)
        index = place // size
        return [self.views[size][index + k] for k in range(count)]

    def store(self, a: Any, size: int, values: list[Any], lanes: Ints, at: int) -> None:
        """Store words at addresses."""
        place = self._index(a, size, size * len(values), lanes, at)
        packed = np.stack(values, axis=1) if len(values) > 1 else values[0].reshape(-1, 1)
        words = np.ascontiguousarray(packed).view(f"u{self.grain}")
        for step in range(words.shape[1]):
            self._writes(place // self.grain + step, words[:, step], lanes, at)
        index = place // size
        for k, value in enumerate(values):
            self.views[size][index + k] = value

    def atomic(
        self, a: Any, change: Callable[[Any, int], Any], dtype: Any, lanes: Ints, at: int
    ) -> Any:
        """Change words thread by thread, the i-th to ``change(old, i)``; return the old words.

        These changes do not race with each other, but with plain reads and writes of other threads before the next
        barrier.
        """
        size = dtype.itemsize
        place = self._index(a, size, size, lanes, at)
        words = place[:, None] // self.grain + np.arange(max(1, size // self.grain))
        flat, whose = words.reshape(-1), np.repeat(lanes, words.shape[1])
        if not self.set[flat].all():
            self.problems.add(
                "uninitialised shared memory read", at, self._place(flat, ~self.set[flat])
            )
        epoch = self.epoch[whose]
        met = (self.written_in[flat] == epoch) & (self.writer[flat] != whose)
        met &= self.writer[flat] != _MANY
        met &= ~self._ordered(self.writer[flat], self.written_after[flat], whose)
        if met.any():
            self.problems.add("race: two threads write", at, self._place(flat, met))
        met = (self.read_in[flat] == epoch) & (
            (self.first_reader[flat] != whose) | (self.last_reader[flat] != whose)
        )
        if met.any():
            self.problems.add(
                "race: written after another thread read it", at, self._place(flat, met)
            )
        view, found = self.views[size], np.zeros(len(a), dtype)
        for i, index in enumerate(place // size):
            found[i : i + 1] = view[index : index + 1].view(dtype)
            view[index : index + 1] = change(found[i : i + 1], i).astype(dtype).view(view.dtype)
        self.written_in[flat], self.writer[flat], self.set[flat] = epoch, _MANY, True
        return found

    def copied_to(self, a: Any, size: int, lanes: Ints, at: int) -> Ints:
        """Return the target words ``(thread, word)`` of copies of `size` bytes; no thread may access them earlier."""
        place = self._index(a, size, size, lanes, at)
        words = place[:, None] // self.grain + np.arange(size // self.grain)
        flat, whose = words.reshape(-1), np.repeat(lanes, words.shape[1])
        if self.awaited[flat].any() or len(np.unique(flat)) < len(flat):
            self.problems.add("race: two copies to one place", at, "shared memory")
        epoch = self.epoch[whose]
        met = (self.written_in[flat] == epoch) & (self.writer[flat] != whose)
        met &= ~self._ordered(self.writer[flat], self.written_after[flat], whose)
        if met.any():
            self.problems.add("race: two threads write", at, self._place(flat, met))
        first, last, after = self.first_reader[flat], self.last_reader[flat], self.read_after[flat]
        met = (self.read_in[flat] == epoch) & ((first != whose) | (last != whose))
        met &= ~(self._ordered(first, after, whose) & self._ordered(last, after, whose))
        if met.any():
            self.problems.add(
                "race: written after another thread read it", at, self._place(flat, met)
            )
        self.awaited[flat] = True
        return words

    def arrive(self, words: Ints, values: Any, lanes: Ints) -> None:
        """Store copied data, as written now by its threads."""
        flat, whose = words.reshape(-1), np.repeat(lanes, words.shape[1])
        self.views[self.grain][flat] = (
            np.ascontiguousarray(values).view(f"u{self.grain}").reshape(-1)
        )
        self.awaited[flat], self.set[flat] = False, True
        self.written_in[flat], self.writer[flat] = self.epoch[whose], whose
        self.written_after[flat] = self.warp_epoch[whose]

    def _ordered(self, others: Ints, after: Ints, lanes: Ints) -> Any:
        """Return whether another thread's access precedes a barrier of the warp of both."""
        return (others // 32 == lanes // 32) & (after < self.warp_epoch[lanes])

    def _writes(self, x: Ints, new: Any, lanes: Ints, at: int) -> None:
        epoch, old = self.epoch[lanes], self.views[self.grain]
        if self.awaited[x].any():
            self.problems.add(
                "race: written while a copy is under way", at, self._place(x, self.awaited[x])
            )
        order = np.argsort(x, kind="stable")
        same = x[order][1:] == x[order][:-1]
        if same.any() and (same & (new[order][1:] != new[order][:-1])).any():
            self.problems.add("different values stored to one place at once", at, "shared memory")
        met = (self.written_in[x] == epoch) & (self.writer[x] != lanes)
        if met.any():
            met &= ~self._ordered(self.writer[x], self.written_after[x], lanes)
            if (met & (old[x] != new)).any():
                self.problems.add("race: two threads write", at, self._place(x, met))
            elif met.any():
                self.problems.notes["the same value written by several threads"] += 1
        first, last = self.first_reader[x], self.last_reader[x]
        met = (self.read_in[x] == epoch) & ((first != lanes) | (last != lanes))
        if met.any():
            after = self.read_after[x]
            met &= ~(self._ordered(first, after, lanes) & self._ordered(last, after, lanes))
            # If the value does not change, earlier readers read the same.
            if (met & (old[x] != new)).any():
                self.problems.add(
                    "race: written after another thread read it", at, self._place(x, met)
                )
        self.written_in[x], self.writer[x], self.set[x] = epoch, lanes, True
        self.written_after[x] = self.warp_epoch[lanes]

    def _reads(self, x: Ints, lanes: Ints, at: int) -> None:
        epoch = self.epoch[lanes]
        if self.awaited[x].any():
            self.problems.add(
                "race: read while a copy is under way", at, self._place(x, self.awaited[x])
            )
        elif not self.set[x].all():
            self.problems.add("uninitialised shared memory read", at, self._place(x, ~self.set[x]))
        met = (self.written_in[x] == epoch) & (self.writer[x] != lanes)
        if met.any():
            met &= ~self._ordered(self.writer[x], self.written_after[x], lanes)
            if met.any():
                self.problems.add(
                    "race: read after another thread wrote it", at, self._place(x, met)
                )
        fresh = self.read_in[x] != epoch
        self.first_reader[x[fresh]] = self.last_reader[x[fresh]] = lanes[fresh]
        np.minimum.at(self.first_reader, x, lanes)
        np.maximum.at(self.last_reader, x, lanes)
        self.read_in[x] = epoch
        self.read_after[x] = self.warp_epoch[lanes]

    def _place(self, x: Ints, chosen: Any) -> str:
        return f"byte {int(x[chosen][0]) * self.grain % self.size - SHARED_START}"


class LocalMemory:
    """Memory of single threads."""

    def __init__(self, threads: int, size: int, problems: Problems) -> None:
        self.problems, self.size = problems, size
        self.bytes = np.full((threads, size), 0xCD, np.uint8)
        self.set = np.zeros((threads, size), np.bool_)

    def _index(self, a: Any, total: int, at: int) -> Ints:
        offsets = a.astype(np.int64)
        if (offsets & (total - 1)).any():
            raise self.problems.stop("misaligned access to local memory", at, int(offsets.max()))
        if (offsets < 0).any() or (offsets + total > self.size).any():
            raise self.problems.stop(
                "access outside of local memory", at, f"{int(offsets.max())} of {self.size}"
            )
        return offsets[:, None] + np.arange(total)

    def load(self, a: Any, size: int, count: int, lanes: Ints, at: int) -> list[Any]:
        """Values of `count` words of `size` bytes at offsets, for some threads."""
        columns = self._index(a, size * count, at)
        if not self.set[lanes[:, None], columns].all():
            self.problems.add("uninitialised local memory read", at, int(a.min()))
        raw = np.ascontiguousarray(self.bytes[lanes[:, None], columns])
        return [
            np.ascontiguousarray(raw[:, k * size : (k + 1) * size]).view(f"u{size}")[:, 0]
            for k in range(count)
        ]

    def store(self, a: Any, size: int, values: list[Any], lanes: Ints, at: int) -> None:
        """Put words at offsets."""
        columns = self._index(a, size * len(values), at)
        raw = np.ascontiguousarray(np.stack(values, axis=1)).view(np.uint8)
        self.bytes[lanes[:, None], columns] = raw
        self.set[lanes[:, None], columns] = True
