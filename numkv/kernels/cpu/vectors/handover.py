"""Launches from several threads of a program, which share one helper instead of a pool of threads each.

GNU OpenMP keeps a pool of threads for each thread that launches. So one thread of the program, the owner, launches
itself; every other one posts its launch as a job, and begins with it at once, as worker 0. The helper, one more thread,
takes jobs in turn and runs the other workers: with a pool of its own, or by itself if there is only one. A caller that
is done before the helper has come takes its job back, and runs what is left of it. So nobody waits for another
one's call, a helper that comes late still finds something to do, and a machine whose cores all have callers is left
alone: the helper does not come while there are as many of them as threads.

All of it is machine code outside of Python, which no signal handler, finaliser or exception can interrupt: for Python,
a call is one step, in whichever thread. The helper is no thread of Python's either, and ends with the process.
"""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Any, NamedTuple

import llvmlite.binding as llvm
from llvmlite import ir

from numkv.kernels.cpu.vectors.emit import I8, I32, I64

__all__ = ["Handover", "make_handover"]

_POINTER, _NUMBERS, _NOTHING = I8.as_pointer(), I64.as_pointer(), ir.VoidType()
# What a kernel's part is, and what shares it out: see `launch`.
_PART = ir.FunctionType(_NOTHING, [_POINTER.as_pointer(), _NUMBERS, _NUMBERS, _POINTER])
_LAUNCH = ir.FunctionType(
    _NOTHING, [_POINTER, _POINTER.as_pointer(), _NUMBERS, _NUMBERS, _POINTER, I64, I64, I32]
)
# Bytes that a mutex and a condition of POSIX take at most.
_LARGEST = 128
# A job's states, and its fields.
_POSTED, _RUNS, _DONE = range(3)
_FUNCTION, _STEPS, _DATA, _WORKERS, _STATE, _NEXT = range(6)


class Handover(NamedTuple):
    """Addresses of functions that take the place of Numba's own, with the same arguments."""

    #: For the thread that owns a pool: launches itself, or posts a job if another call is under way.
    own: int
    #: For every other thread: posts a job.
    share: int


def make_handover(launch: int, limit: int, spins: int) -> Handover | None:
    """Compile it and start the helper, once in a process; None where the system has no POSIX threads.

    Parameters
    ----------
    launch : int
        The address of what shares out calls among Numba's threads.
    limit : int
        Callers at once from which on the helper does not help.
    spins : int
        Turns of a loop in which a thread waits for another before it sleeps.
    """
    if os.name != "posix":
        return None
    process = ctypes.CDLL(None)
    own, share, serve = _Module(process, launch, limit, spins).addresses()
    # Python's signals are for Python's threads.
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        thread = ctypes.c_ulong()
        # Where no thread is to be had, callers find their jobs as they left them.
        if process.pthread_create(ctypes.byref(thread), None, ctypes.c_void_p(serve), None) == 0:
            process.pthread_detach(thread)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
    return Handover(own, share)


class _Module:
    """The functions in LLVM.

    Mutex and conditions guard a list of jobs that wait, and how many callers are inside.
    """

    def __init__(self, process: Any, launch: int, limit: int, spins: int) -> None:
        self.module = ir.Module("numkv.handover", context=ir.Context())
        self._process = process
        self._limit, self._spins = I64(limit), I64(spins)
        self._launch = launch
        job = self.module.context.get_identified_type("numkv.job")
        job.set_body(_POINTER, _NUMBERS, _POINTER, I64, I64, job.as_pointer())
        self._job = job
        self._head = self._global("head", job.as_pointer())
        self._active = self._global("active", I64)
        self._mutex, self._posted, self._finished = (
            self._global(name, ir.ArrayType(I8, _LARGEST)) for name in ("mutex", "posted", "finished")
        )  # fmt: skip
        share = self._make_share()
        self._make_own(share)
        self._make_serve()

    def addresses(self) -> tuple[int, int, int]:
        """Compile; the addresses of what owners and others call, and of what the helper runs."""
        llvm.initialize_native_target()
        llvm.initialize_native_asmprinter()
        parsed = llvm.parse_assembly(str(self.module))
        parsed.verify()
        machine = llvm.Target.from_default_triple().create_target_machine(opt=2)
        engine = llvm.create_mcjit_compiler(parsed, machine)
        engine.finalize_object()
        # The helper runs it until the process ends: nobody may free it, not even Python at its end.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(engine))
        initialise = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
        for name, kind in (("mutex", "mutex"), ("posted", "cond"), ("finished", "cond")):
            initialise((f"pthread_{kind}_init", self._process))(
                engine.get_global_value_address(name), None
            )
        return tuple(engine.get_function_address(name) for name in ("own", "share", "serve"))

    def _global(self, name: str, type_: Any) -> Any:
        place = ir.GlobalVariable(self.module, type_, name)
        place.initializer = ir.Constant(type_, None)
        place.align = 16
        return place

    def _posix(self, b: Any, name: str, *places: Any) -> None:
        """Call a function of POSIX threads with places of its types."""
        address = ctypes.cast(getattr(self._process, f"pthread_{name}"), ctypes.c_void_p).value
        type_ = ir.FunctionType(I32, [_POINTER] * len(places))
        called = b.inttoptr(I64(address), type_.as_pointer())
        b.call(called, [b.bitcast(place, _POINTER) for place in places])

    def _launcher(self, b: Any) -> Any:
        return b.inttoptr(I64(self._launch), _LAUNCH.as_pointer())

    def _lock(self, b: Any) -> None:
        self._posix(b, "mutex_lock", self._mutex)

    def _unlock(self, b: Any) -> None:
        self._posix(b, "mutex_unlock", self._mutex)

    def _count(self, b: Any, change: int) -> None:
        """A caller comes or goes; when one goes, the helper may have been waiting for it."""
        b.store(b.add(b.load(self._active), I64(change)), self._active)
        if change < 0:
            self._wake(b)

    def _is_wanted(self, b: Any) -> Any:
        """Whether there is a job, and a core for the helper."""
        few = b.icmp_signed("<", b.load(self._active), self._limit)
        return b.and_(_is_set(b, b.load(self._head)), few)

    def _wake(self, b: Any) -> None:
        """Wake the helper if it is wanted: else it would take a core from a caller only to sleep again."""
        with b.if_then(self._is_wanted(b)):
            self._posix(b, "cond_signal", self._posted)

    def _field(self, b: Any, job: Any, field: int) -> Any:
        return b.gep(job, [I32(0), I32(field)], inbounds=True)

    def _part(self, b: Any, places: Any, job: Any, first: Any, count: Any) -> None:
        """Run workers ``[first, first + count)`` of a job in this thread."""
        starts, counts = places
        b.store(b.inttoptr(first, _POINTER), starts)
        b.store(count, counts)
        function, steps, data = (b.load(self._field(b, job, i)) for i in (_FUNCTION, _STEPS, _DATA))
        b.call(b.bitcast(function, _PART.as_pointer()), [starts, counts, steps, data])

    def _wait_busily(self, b: Any, is_over: Any) -> None:
        """Turn in a loop until something is over, `spins` times at most, while no more than one caller is inside."""
        here = b.block
        turn, check, after = (b.append_basic_block(name) for name in ("turn", "check", "after"))
        b.branch(turn)
        b.position_at_end(turn)
        i = b.phi(I64)
        i.add_incoming(I64(0), here)
        b.cbranch(b.icmp_signed("<", i, self._spins), check, after)
        b.position_at_end(check)
        _pause(b)
        alone = b.icmp_signed("<=", b.load_atomic(self._active, "monotonic", 8), I64(1))
        i.add_incoming(b.add(i, I64(1)), check)
        b.cbranch(b.and_(b.not_(is_over(b)), alone), turn, after)
        b.position_at_end(after)

    def _find(self, b: Any, wanted: Any) -> Any:
        """The place of the list that points to a job; with null to the end. The list is locked."""
        here, loop, after = b.block, b.append_basic_block("find"), b.append_basic_block("found")
        b.branch(loop)
        b.position_at_end(loop)
        place = b.phi(self._head.type)
        place.add_incoming(self._head, here)
        job = b.load(place)
        step = b.append_basic_block("step")
        b.cbranch(b.icmp_unsigned("==", job, wanted), after, step)
        b.position_at_end(step)
        place.add_incoming(self._field(b, job, _NEXT), step)
        b.branch(loop)
        b.position_at_end(after)
        return place

    def _make_share(self) -> Any:
        """Post a job; run worker 0; take the job back and run all of it, or wait for the helper."""
        function = ir.Function(self.module, _LAUNCH, "share")
        b = ir.IRBuilder(function.append_basic_block())
        part, _, counts, steps, data, *_ = function.args
        job, places = b.alloca(self._job), (b.alloca(_POINTER), b.alloca(I64))
        workers = b.load(counts)
        nobody = ir.Constant(self._job.as_pointer(), None)
        for i, value in enumerate((part, steps, data, workers, I64(_POSTED), nobody)):
            b.store(value, self._field(b, job, i))
        state = self._field(b, job, _STATE)
        self._lock(b)
        self._count(b, 1)
        b.store(job, self._find(b, nobody))
        self._wake(b)
        self._unlock(b)
        self._part(b, places, job, I64(0), I64(1))

        self._lock(b)
        with b.if_else(b.icmp_signed("==", b.load(state), I64(_POSTED))) as (nobody_came, helped):
            with nobody_came:
                b.store(b.load(self._field(b, job, _NEXT)), self._find(b, job))
                self._unlock(b)
                self._part(b, places, job, I64(1), b.sub(workers, I64(1)))
                self._lock(b)
            with helped:
                self._unlock(b)
                self._wait_busily(b, lambda b: _equals(b, state, _DONE))
                self._lock(b)
                _while(
                    b, lambda: b.not_(_equals(b, state, _DONE)),
                    lambda: self._posix(b, "cond_wait", self._finished, self._mutex),
                )  # fmt: skip
        self._count(b, -1)
        self._unlock(b)
        b.ret_void()
        return function

    def _make_own(self, share: Any) -> None:
        """Launch, if no other caller is inside; else do as they do."""
        function = ir.Function(self.module, _LAUNCH, "own")
        b = ir.IRBuilder(function.append_basic_block())
        self._lock(b)
        with b.if_then(b.icmp_signed("==", b.load(self._active), I64(0)), likely=True):
            self._count(b, 1)
            self._unlock(b)
            b.call(self._launcher(b), function.args)
            self._lock(b)
            self._count(b, -1)
            self._unlock(b)
            b.ret_void()
        self._unlock(b)
        b.call(share, function.args)
        b.ret_void()

    def _make_serve(self) -> None:
        """What the helper does for ever: wait for a job, run its workers but the first, say that it is done."""
        function = ir.Function(self.module, ir.FunctionType(_POINTER, [_POINTER]), "serve")
        b = ir.IRBuilder(function.append_basic_block())
        starts, counts, step = b.alloca(_POINTER), b.alloca(I64), b.alloca(I64)
        b.store(I64(1), step)
        serve = b.append_basic_block("serve")
        self._lock(b)
        b.branch(serve)
        b.position_at_end(serve)

        _while(
            b, lambda: b.not_(self._is_wanted(b)),
            lambda: self._posix(b, "cond_wait", self._posted, self._mutex),
        )  # fmt: skip
        job = b.load(self._head)
        b.store(b.load(self._field(b, job, _NEXT)), self._head)
        state = self._field(b, job, _STATE)
        b.store(I64(_RUNS), state)
        self._unlock(b)
        others = b.sub(b.load(self._field(b, job, _WORKERS)), I64(1))
        with b.if_else(b.icmp_signed("<=", others, I64(1))) as (one, several):
            with one:
                self._part(b, (starts, counts), job, I64(1), others)
            with several:
                b.store(b.inttoptr(I64(1), _POINTER), starts)
                b.store(others, counts)
                called, data = (b.load(self._field(b, job, i)) for i in (_FUNCTION, _DATA))
                b.call(
                    self._launcher(b),
                    [called, starts, counts, step, data, I64(0), I64(1), b.trunc(others, I32)],
                )  # fmt: skip
        self._lock(b)
        b.store_atomic(I64(_DONE), state, "release", 8)
        self._posix(b, "cond_broadcast", self._finished)
        self._unlock(b)
        self._wait_busily(b, lambda b: _is_set(b, b.load_atomic(self._head, "monotonic", 8)))
        self._lock(b)
        b.branch(serve)


def _is_set(b: Any, pointer: Any) -> Any:
    return b.icmp_unsigned("!=", pointer, ir.Constant(pointer.type, None))


def _equals(b: Any, place: Any, value: int) -> Any:
    return b.icmp_signed("==", b.load_atomic(place, "acquire", 8), I64(value))


def _while(b: Any, condition: Any, body: Any) -> None:
    check, inside, after = (b.append_basic_block(name) for name in ("check", "inside", "after"))
    b.branch(check)
    b.position_at_end(check)
    b.cbranch(condition(), inside, after)
    b.position_at_end(inside)
    body()
    b.branch(check)
    b.position_at_end(after)


def _pause(b: Any) -> None:
    """Tell the core that this loop waits."""
    text = {"x86_64": "pause", "AMD64": "pause", "aarch64": "yield", "arm64": "yield"}
    machine = os.uname().machine
    if machine in text:
        b.asm(ir.FunctionType(_NOTHING, []), text[machine], "", [], side_effect=True)
