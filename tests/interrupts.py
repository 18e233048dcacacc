"""Interrupts before lines of Python: a trace function that sends a real signal, whose handler raises."""

import ast
import contextlib
import functools
import linecache
import pathlib
import random
import signal
import sys
import threading

import numkv

ROOT = pathlib.Path(numkv.__file__).parent


class Interrupt(BaseException):
    pass


@contextlib.contextmanager
def raising_signals():
    """SIGUSR1 raises `Interrupt`."""

    def handler(number, frame):
        raise Interrupt

    before = signal.signal(signal.SIGUSR1, handler)
    yield handler
    assert signal.getsignal(signal.SIGUSR1) is handler
    signal.signal(signal.SIGUSR1, before)


@functools.cache
def left_out(filename):
    """Lines before which Python never looks for signals, as it does so at calls, at entries and in loops alone.

    They release a claimed object, or follow directly on a method's call by `reads`.
    """
    found = set()
    for node in ast.walk(ast.parse("".join(linecache.getlines(filename)))):
        if isinstance(node, ast.Try) and "del writer" in "".join(map(ast.unparse, node.finalbody)):
            last = node.finalbody
            assert not [
                x
                for each in last
                for x in ast.walk(each)
                if isinstance(x, ast.Call | ast.For | ast.While)
            ]
            found.update(range(last[0].lineno, last[-1].end_lineno + 1))
        if isinstance(node, ast.If) and ast.unparse(node.test) == "access.dropped != before":
            found.update((node.lineno, node.lineno + 1, node.end_lineno + 1))
    return found


def interrupted(do, it, at=-1):
    """Call `do`, with a signal before a line of numkv; return the number of lines, and where the signal came."""
    lines, where = 0, None

    def at_line(frame, event, arg):
        nonlocal lines, where
        code = frame.f_code
        if event == "line" and frame.f_lineno not in left_out(code.co_filename):
            lines += 1
            if lines == at:
                where = code.co_filename, code.co_name, frame.f_lineno
                signal.raise_signal(signal.SIGUSR1)
        return at_line

    def at_call(frame, event, arg):
        return at_line if frame.f_code.co_filename.startswith(str(ROOT)) else None

    sys.settrace(at_call)
    try:
        do(it)
    except Interrupt:
        return lines, where
    finally:
        sys.settrace(None)
    assert where is None, f"nothing was raised for the signal at {where}"
    return lines, None


def interrupted_in_a_condition(do, at):
    """Call `do`, with a signal as soon as it has taken its n-th lock of a condition; return whether one came."""
    taken, of = 0, threading.Condition.__enter__.__code__

    def at_return(frame, event, arg):
        nonlocal taken
        if event == "return":
            taken += 1
            if taken == at:
                signal.raise_signal(signal.SIGUSR1)
        return at_return

    sys.settrace(lambda frame, event, arg: at_return if frame.f_code is of else None)
    try:
        do()
    except Interrupt:
        return True
    finally:
        sys.settrace(None)
    assert taken < at, "nothing was raised for the signal"
    return False


def walk(make, do, see, allowed=(), samples=None, name=""):
    """Interrupt a call at some or all of its lines: the object must be as before the call, or as after it.

    Parameters
    ----------
    make : function
        ``make() -> object`` makes one that the call is ready for.
    do, see : function
        ``do(object)`` is the call; ``see(object)`` says what can be seen of one.
    allowed : sequence of function
        Other calls, whose results an interrupted call may leave.
    samples : int, optional
        How many lines; all if None.
    name : str
        The call's name.
    """
    sound = [see(make())]
    for each in (do, *allowed):
        it = make()
        each(it)
        sound.append(see(it))
    lines, _ = interrupted(do, make())
    chosen = range(1, lines + 1)
    if samples is not None:
        chosen = sorted(random.Random(name).sample(chosen, min(samples, lines)))
    for at in chosen:
        it = make()
        _, where = interrupted(do, it, at)
        if where is not None:  # later calls may run fewer lines, as they find things remembered
            assert see(it) in sound, f"{name}: torn by an interrupt at {where}"
