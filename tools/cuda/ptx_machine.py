"""An interpreter of PTX in NumPy: it runs the threads of a few blocks at once, each instruction for all active threads.

Threads continue from the lowest address of any thread, so diverged threads meet again. The interpreter finds errors
that a result does not show: races between barriers, uninitialised values, divergent barriers, and misaligned or stray
accesses. It also counts executed warp instructions. Unknown PTX is an error.

It does not model some things: approximate instructions are exact; ``ftz`` flushes nothing; blocks run in turns and see
every store at once, unlike global memory; caches and registers have no sizes.
"""

from __future__ import annotations

import types
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tools.cuda import ptx_arithmetic as arithmetic
from tools.cuda.ptx_memory import GlobalMemory, LocalMemory, Problems, SharedMemory
from tools.cuda.ptx_program import BITS, LOCAL_WINDOW, SHARED_WINDOW, Program, PtxError, is_barrier
from tools.cuda.ptx_tensor import TensorInstructions, fma_pair, to_pair
from tools.cuda.ptx_translate import Translator, dtype_of, reads_and_writes

__all__ = ["Compiled", "Run", "run"]

#: Approximate number of threads that run at once; more threads reduce NumPy's overhead.
THREADS_AT_ONCE = 1024
#: Most basic blocks of a batch, after which it counts as hanging.
MOST_STEPS = 3_000_000

#: New values of atomic operations, from the old value and the operand.
ATOMICS: dict[str, Any] = {
    "add": np.add, "min": np.minimum, "max": np.maximum, "and": np.bitwise_and, "or": np.bitwise_or,
    "xor": np.bitwise_xor,
}  # fmt: skip
Find = Callable[[int], "tuple[int, int] | None"]

FAR = np.int64(1) << np.int64(40)


@dataclass
class Run:
    """The result of a launch."""

    problems: Problems = field(default_factory=Problems)
    warp_instructions: int = 0
    barriers: int = 0
    executed: Counter[int] = field(
        default_factory=Counter
    )  #: warp instructions, by the start of their basic block

    @property
    def ok(self) -> bool:
        """Return whether the launch had no problem."""
        return not self.problems.counts


class Compiled:
    """A program as Python code; one for all of its launches."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.tracked = unset_somewhere(program)
        self.translator = Translator(program, self.tracked)
        self._code: dict[tuple[int, bool], types.CodeType] = {}
        elsewhere = {"global", "local", "param", "const"}
        accesses = [x.parts for x in program.code if x.parts[0] in ("ld", "st", "atom", "red")]
        sizes = [BITS.get(p[-1], 8) // 8 for p in accesses if not elsewhere & set(p)]
        self.grain = min([4, *sizes])

    def code(self, start: int, masked: bool) -> types.CodeType:
        """The code of a basic block, for all threads or for those of a mask."""
        key = start, masked
        if key not in self._code:
            lines = []
            for at in range(start, self.program.blocks[start]):
                opcode = self.program.code[at].opcode
                if not opcode.startswith(("bra", "ret", "exit")) and not is_barrier(
                    self.program.code[at]
                ):
                    lines += self.translator.lines(at, masked)
            body = "\n".join(f"    {line}" for line in lines) or "    pass"
            module = compile(
                f"def block(M):\n{body}\n", f"<{self.program.name[:40]} at {start}>", "exec"
            )
            self._code[key] = next(c for c in module.co_consts if isinstance(c, types.CodeType))
        return self._code[key]


def _successors(program: Program) -> dict[int, list[int]]:
    found = {}
    for start, end in program.blocks.items():
        last = program.code[end - 1]
        following = [end] if end < len(program.code) else []
        if last.opcode.startswith("bra"):
            to = program.labels[last.operands[-1]]
            found[start] = [to, *(following if last.predicate else [])]
        elif last.opcode.startswith(("ret", "exit")):
            found[start] = following if last.predicate else []
        else:
            found[start] = following
    return found


def unset_somewhere(program: Program) -> set[str]:
    """Return the registers that may be read before they are set, on some path through the program."""
    names = {register: 1 << i for i, register in enumerate(program.registers)}
    for x in program.code:
        if unknown := [r for part in reads_and_writes(x) for r in part if r not in names]:
            raise PtxError(f"unknown register: {unknown[0]} in {x.text}")
    sets: dict[int, int] = {}
    for start, end in program.blocks.items():
        sets[start] = 0
        for x in program.code[start:end]:
            for register in reads_and_writes(x)[1]:
                sets[start] |= names[register]
    everything = (1 << len(names)) - 1
    at_start = dict.fromkeys(program.blocks, everything)
    at_start[0] = 0
    following, waiting = _successors(program), [0]
    while waiting:
        start = waiting.pop()
        after = at_start[start] | sets[start]
        for to in following[start]:
            if at_start[to] & after != at_start[to]:
                at_start[to] &= after
                waiting.append(to)
    found = set()
    for start, end in program.blocks.items():
        known = at_start[start]
        for x in program.code[start:end]:
            reads, writes = reads_and_writes(x)
            found |= {r for r in reads if not names[r] & known}
            for register in writes:
                known |= names[register]
    # Copies pass marks on.
    changed = True
    while changed:
        changed = False
        for x in program.code:
            reads, writes = reads_and_writes(x)
            if x.opcode.startswith("mov") and len(reads) == len(writes) == 1 and reads[0] in found:
                changed |= writes[0] not in found
                found.add(writes[0])
    return found


class _Batch(TensorInstructions):
    """Blocks that run at once."""

    def __init__(
        self, compiled: Compiled, blocks: int, block: tuple[int, int, int], shared_bytes: int, find: Find, result: Run
    ) -> None:  # fmt: skip
        self.compiled, self.program, self.result = compiled, compiled.program, result
        self.blocks, self.block, self.shared_bytes = blocks, block, shared_bytes
        self.threads = block[0] * block[1] * block[2]
        if self.threads % 32:
            raise PtxError(f"expected whole warps, got {self.threads} threads")
        self.total = blocks * self.threads
        self.lanes = np.arange(self.total, dtype=np.int64)
        self.memory = GlobalMemory(find, result.problems)
        self.registers: dict[str, Any] = {}
        self.marks: dict[str, Any] = {}
        self.names: dict[str, Any] = {}
        self.functions: dict[tuple[int, bool], Callable[[Any], None]] = {}
        self._fill_names()

    def _fill_names(self) -> None:
        helpers = {
            "np": np, "load": self.load, "store": self.store, "atomic": self.atomic, "unset": self.unset,
            "warp_sync": self.warp_sync, "active_mask": self.active_mask, "shuffle": self.shuffle, "vote": self.vote,
            "different": arithmetic.not_equal, "to_bf16": _to_bf16, "to_pair": to_pair, "fma_pair": fma_pair,
            "copy_async": self.copy_async, "commit_copies": self.commit_copies,
            "wait_for_copies": self.wait_for_copies, "load_matrices": self.load_matrices,
            "multiply_matrices": self.multiply_matrices, "transpose_matrix": self.transpose_matrix,
        }  # fmt: skip
        for name in (
            "fma32", "fma32_down", "fma32_up", "fma32_zero", "fma64", "divide", "high", "shift_left",
            "shift_right", "permute", "convert_to_int", "extract", "insert", "logic3", "count_ones", "leading_zeros",
            "reversed_bits", "funnel",
        ):  # fmt: skip
            helpers[name] = getattr(arithmetic, name)
        helpers |= {
            f"compare_{name}": function for name, function in arithmetic.COMPARISONS.items()
        }
        helpers |= {f"function_{name}": function for name, function in arithmetic.FUNCTIONS.items()}
        self.names |= helpers

    # -- names that generated code uses

    def array(self, register: str) -> Any:
        """The array of a register."""
        if register not in self.registers:
            of = self.program.registers[register]
            dtype = np.bool_ if of == "pred" else f"u{BITS[of] // 8}"
            self.registers[register] = np.zeros(self.total, dtype)
        return self.registers[register]

    def function(self, start: int, masked: bool) -> Callable[[Any], None]:
        """A basic block as a function over this batch's arrays."""
        key = start, masked
        found = self.functions.get(key)
        if found is None:
            code, translator = self.compiled.code(start, masked), self.compiled.translator
            for name in code.co_names:
                if name not in self.names:
                    self._bind(name, translator)
            found = self.functions[key] = types.FunctionType(code, self.names)
        return found

    def _bind(self, name: str, translator: Translator) -> None:
        if name in translator.views:
            register, of = translator.views[name]
            if of == "set":
                self.names[name] = self.marks.setdefault(register, np.zeros(self.total, np.bool_))
            else:
                self.names[name] = self.array(register).view(dtype_of(of))
        elif name in translator.constants:
            self.names[name] = translator.constants[name]
        elif name in translator.specials:
            self.names[name] = self.special(translator.specials[name])
        elif name in translator.params:
            self.names[name] = self.param(*translator.params[name])

    def special(self, register: str) -> Any:
        """A special register's values."""
        inside = (self.lanes % self.threads).astype(np.uint32)
        bx, by, _ = (np.uint32(n) for n in self.block)
        shared = self.program.shared_end - 1024 + self.shared_bytes
        found = {
            "%tid.x": inside % bx, "%tid.y": inside // bx % by, "%tid.z": inside // bx // by,
            "%laneid": inside % np.uint32(32), "%warpid": inside // np.uint32(32),
            "%lanemask_lt": (np.uint32(1) << (inside % np.uint32(32))) - np.uint32(1),
            "%dynamic_smem_size": np.full(self.total, self.shared_bytes, np.uint32),
            "%total_smem_size": np.full(self.total, shared, np.uint32),
        }  # fmt: skip
        for i, axis in enumerate("xyz"):
            found[f"%ntid.{axis}"] = np.full(self.total, self.block[i], np.uint32)
            found[f"%nctaid.{axis}"] = np.full(self.total, self.grid[i], np.uint32)
            found[f"%ctaid.{axis}"] = np.repeat(self.numbers[i], self.threads).astype(np.uint32)
        return found[register]

    def param(self, name: str, offset: int, of: str) -> Any:
        """A parameter, or a part of one."""
        raw = self.params[name][offset : offset + BITS[of] // 8]
        return np.frombuffer(raw, dtype_of(of))[0]

    # -- what generated code calls

    def load(
        self, space: str, base: Any, offset: int, size: int, count: int, mask: Any, at: int
    ) -> list[Any]:
        """Load words for all threads, or for those of a mask."""
        a, lanes = self._addresses(base, offset, mask)
        if space == "generic":
            return self._by_window(a, lanes, at, size, count)
        if space == "global":
            return self.memory.load(a, size, count, at)
        place = self.shared if space == "shared" else self.local
        return place.load(a, size, count, lanes, at)

    def store(
        self,
        space: str,
        base: Any,
        offset: int,
        size: int,
        values: tuple[Any, ...],
        mask: Any,
        at: int,
    ) -> None:
        """Store words of all threads, or of those of a mask."""
        a, lanes = self._addresses(base, offset, mask)
        parts = [np.broadcast_to(v, (self.total,)) for v in values]
        chosen = [v if mask is None else v[mask] for v in parts]
        if space == "generic":
            self._store_by_window(a, lanes, at, size, chosen)
        elif space == "global":
            self.memory.store(a, size, chosen, at)
        else:
            place = self.shared if space == "shared" else self.local
            place.store(a, size, chosen, lanes, at)

    def _addresses(self, base: Any, offset: int, mask: Any) -> tuple[Any, Any]:
        a = np.broadcast_to(np.asarray(base).astype(np.uint64), (self.total,))
        if offset:
            a = a + np.uint64(offset & 0xFFFFFFFFFFFFFFFF)
        return (a, self.lanes) if mask is None else (a[mask], self.lanes[mask])

    def _windows(self, a: Any) -> list[tuple[str, int, Any]]:
        high = a >> np.uint64(56)
        windows = {"global": 0, "shared": SHARED_WINDOW, "local": LOCAL_WINDOW}
        spaces = {window >> 56: (space, window) for space, window in windows.items()}
        return [(*spaces.get(int(h), ("global", 0)), high == h) for h in np.unique(high)]

    def _by_window(self, a: Any, lanes: Any, at: int, size: int, count: int) -> list[Any]:
        found = [np.zeros(a.shape, f"u{size}") for _ in range(count)]
        for space, window, mine in self._windows(a):
            b, own = a[mine] - np.uint64(window), lanes[mine]
            if space == "global":
                parts = self.memory.load(b, size, count, at)
            else:
                parts = (self.shared if space == "shared" else self.local).load(
                    b, size, count, own, at
                )
            for k in range(count):
                found[k][mine] = parts[k]
        return found

    def _store_by_window(self, a: Any, lanes: Any, at: int, size: int, values: list[Any]) -> None:
        for space, window, mine in self._windows(a):
            b, own, parts = a[mine] - np.uint64(window), lanes[mine], [v[mine] for v in values]
            if space == "global":
                self.memory.store(b, size, parts, at)
            else:
                (self.shared if space == "shared" else self.local).store(b, size, parts, own, at)

    def atomic(
        self, space: str, operation: str, base: Any, offset: int, values: tuple[Any, ...], mask: Any, at: int
    ) -> Any:  # fmt: skip
        """Change words atomically, thread by thread; return the old words."""
        a, lanes = self._addresses(base, offset, mask)
        parts = [np.broadcast_to(v, (self.total,)) for v in values]
        parts = parts if mask is None else [v[mask] for v in parts]
        dtype = parts[0].dtype

        def change(old: Any, i: int) -> Any:
            if operation == "cas":
                return parts[1][i : i + 1] if old[0] == parts[0][i] else old
            given = parts[0][i : i + 1]
            return given if operation == "exch" else ATOMICS[operation](old, given)

        if space == "generic":
            windows = self._windows(a)
            if len(windows) == 1:
                space, window, _ = windows[0]
                a = a - np.uint64(window)
        if space == "shared":
            return self.shared.atomic(a, change, dtype, lanes, at)
        if space != "global":
            raise PtxError(f"atomics in {space} memory are not known")
        found = np.zeros(len(a), dtype)
        for i in range(len(a)):
            found[i] = self.memory.load(a[i : i + 1], dtype.itemsize, 1, at)[0].view(dtype)[0]
            new = change(found[i : i + 1], i).astype(dtype).view(f"u{dtype.itemsize}")
            self.memory.store(a[i : i + 1], dtype.itemsize, [new], at)
        return found

    def unset(self, marks: Any, mask: Any, at: int) -> None:
        """Record threads that read a register before they set it."""
        if not (marks if mask is None else marks[mask]).all():
            self.result.problems.add(
                "register read that was not set", at, self.program.code[at].text
            )

    def _warps(self, mask: Any) -> Any:
        return (np.ones(self.total, np.bool_) if mask is None else mask).reshape(-1, 32)

    def active_mask(self, mask: Any) -> Any:
        """Lanes of each warp that run this."""
        bits = (
            (self._warps(mask) * (np.uint64(1) << np.arange(32, dtype=np.uint64)))
            .sum(1)
            .astype(np.uint32)
        )
        return np.repeat(bits, 32)

    def _members(self, members: Any, mask: Any, at: int) -> None:
        """Check that all threads that must meet here are active."""
        here = self.active_mask(mask)
        named = np.broadcast_to(members, (self.total,))
        active = slice(None) if mask is None else mask
        if (named[active] & ~here[active]).any():
            self.result.problems.add("a warp's threads do not meet", at, self.program.code[at].text)

    def warp_sync(self, mask: Any, members: Any, at: int) -> None:
        """``bar.warp.sync``."""
        self._members(members, mask, at)
        self.shared.warp_epoch[slice(None) if mask is None else mask] += 1

    def shuffle(
        self, mode: str, value: Any, by: Any, clamp: Any, members: Any, mask: Any, at: int
    ) -> tuple[Any, Any]:
        """``shfl.sync``: return another thread's value for each thread, and whether it is in the same segment."""
        self._members(members, mask, at)
        value, by, clamp = (
            np.broadcast_to(v, (self.total,)).astype(np.int64) for v in (value, by, clamp)
        )
        lane = self.lanes % 32
        segment, limit, by = (clamp >> 8) & 31, clamp & 31, by & 31
        highest = (lane & segment) | (limit & ~segment)
        lowest = lane & segment
        if mode == "up":
            source = lane - by
            inside = source >= highest
        elif mode == "down":
            source = lane + by
            inside = source <= highest
        else:
            source = lane ^ by if mode == "bfly" else lowest | (by & ~segment)
            inside = source <= highest
        source = np.where(inside, source, lane) + self.lanes // 32 * 32
        if mask is not None and not mask[source[mask]].all():
            self.result.problems.add(
                "a value taken from a thread that is not here", at, self.program.code[at].text
            )
        return value[source].astype(np.uint32), inside

    def vote(self, mode: str, value: Any, members: Any, mask: Any, at: int) -> Any:
        """``vote.sync``."""
        self._members(members, mask, at)
        here = self._warps(mask)
        chosen = np.broadcast_to(value, (self.total,)).reshape(-1, 32) & here
        if mode == "ballot":
            return self.active_mask(chosen.reshape(-1))
        found = chosen.any(1) if mode == "any" else (chosen | ~here).all(1)
        return np.repeat(found, 32)

    # -- execution

    def start(self, numbers: Any, grid: tuple[int, int, int], params: dict[str, bytes]) -> None:
        """Reset all state for blocks of these numbers."""
        self.numbers, self.grid, self.params = numbers, grid, params
        size = self.program.shared_end + self.shared_bytes
        self.shared = SharedMemory(
            self.blocks, self.threads, size, self.compiled.grain, self.result.problems
        )
        self.start_copies()
        self.local = LocalMemory(self.total, self.program.local_bytes, self.result.problems)
        for array in (*self.registers.values(), *self.marks.values()):
            array[...] = 0
        translator = self.compiled.translator
        for name in [n for n in self.names if n in translator.specials or n in translator.params]:
            self._bind(name, translator)

    def go(self, present: Any) -> None:
        """Run the blocks to their ends.

        Parameters
        ----------
        present : bool array (blocks,)
            Which of them there are.
        """
        program, result = self.program, self.result
        at = np.where(np.repeat(present, self.threads), 0, FAR)  # FAR: ended, or waits at a barrier
        waits_at = np.full(self.total, -1, np.int64)
        alive = np.repeat(present, self.threads)
        for _ in range(MOST_STEPS):
            start = int(at.min())
            if start == FAR:
                if waits_at.max() >= 0:
                    raise PtxError("threads wait for each other, and none goes on")
                return
            mask = at == start
            everyone = bool(mask.all())
            self.function(start, not everyone)(mask)
            end = program.blocks[start]
            warps = self.total // 32 if everyone else int(mask.reshape(-1, 32).any(1).sum())
            result.warp_instructions += warps * (end - start)
            result.executed[start] += warps * (end - start)
            last = program.code[end - 1]
            if last.opcode.startswith("bra"):
                to = program.labels[last.operands[-1]]
                if last.predicate:
                    taken = self.array(last.predicate) != last.negated
                    at[mask & taken], at[mask & ~taken] = to, end
                else:
                    at[mask] = to
            elif last.opcode.startswith(("ret", "exit")):
                leaves = mask
                if last.predicate:
                    leaves = mask & (self.array(last.predicate) != last.negated)
                    at[mask] = end
                at[leaves], alive[leaves] = FAR, False
                self._release(at, waits_at, alive)
            elif is_barrier(last):
                if last.predicate or last.operands not in (("0",), ()):
                    raise PtxError(f"unknown barrier: {last.text}")
                at[mask], waits_at[mask] = FAR, end
                self._release(at, waits_at, alive)
            else:
                at[mask] = end if end < len(program.code) else FAR
        raise PtxError("the kernel does not end")

    def _release(self, at: Any, waits_at: Any, alive: Any) -> None:
        """Release the blocks whose threads all wait."""
        waiting = (waits_at >= 0).reshape(self.blocks, -1)
        living = alive.reshape(self.blocks, -1)
        ready = (waiting | ~living).all(1) & waiting.any(1)
        for b in np.nonzero(ready)[0]:
            mine = slice(b * self.threads, (b + 1) * self.threads)
            places = waits_at[mine][waiting[b]]
            if places.min() != places.max():
                found = sorted({int(p) - 1 for p in places})
                self.result.problems.add(
                    "threads of a block wait at different barriers", found[0], found
                )
            if not living[b].all():
                self.result.problems.add(
                    "barrier that some threads have left behind", int(places[0]) - 1, "they ended"
                )
            at[mine] = np.where(waits_at[mine] >= 0, waits_at[mine], at[mine])
            waits_at[mine] = -1
            self.shared.epoch[mine] += 1
            self.result.barriers += 1


def _to_bf16(a: Any) -> Any:
    """float32 as bfloat16: to nearest, ties to even."""
    bits = np.asarray(a).view(np.uint32)
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return np.where(np.isnan(a), np.uint32(0x7FFF), rounded).astype(np.uint16)


def run(
    compiled: Compiled, grid: tuple[int, int, int], block: tuple[int, int, int], shared_bytes: int,
    params: dict[str, bytes], find: Callable[[int], tuple[int, int] | None], only: Any = None,
) -> Run:  # fmt: skip
    """Run a launch.

    Parameters
    ----------
    compiled : Compiled
        The kernel.
    grid, block : tuple of int
        Blocks, and threads of each.
    shared_bytes : int
        Dynamic shared memory.
    params : dict of str to bytes
        Each parameter's bytes.
    find : function
        Returns the first address and the bytes of the allocation that contains an address, or None.
    only : int array or None
        Numbers of the blocks to run; all blocks if None.

    Returns
    -------
    Run
        Counts and problems; results are in memory.

    Raises
    ------
    PtxError
        If it cannot continue: an access outside of memory, or an unknown instruction. The run is its `result`.
    """
    result = Run()
    threads = block[0] * block[1] * block[2]
    chosen = np.arange(grid[0] * grid[1] * grid[2]) if only is None else np.asarray(only)
    total = len(chosen)
    at_once = max(1, min(total, THREADS_AT_ONCE // threads))
    with np.errstate(all="ignore"):
        batch = _Batch(compiled, at_once, block, shared_bytes, find, result)
        try:
            for first in range(0, total, at_once):
                present = np.arange(first, first + at_once) < total
                flat = chosen[np.minimum(np.arange(first, first + at_once), total - 1)]
                numbers = flat % grid[0], flat // grid[0] % grid[1], flat // grid[0] // grid[1]
                batch.start(numbers, grid, params)
                batch.go(present)
        except PtxError as error:
            error.result = result  # type: ignore[attr-defined]
            raise
    return result
