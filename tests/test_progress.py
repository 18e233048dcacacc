"""Whoever has to wait for the compiler is told what is being compiled, and nobody else is bothered."""

import contextlib
import io
import logging
import sys
import threading
import time

import numba
import pytest
from numba import types

from numkv.cli.output import kernel_progress
from numkv.kernels import builder

LINE = "numkv: compiling something\n"


class Terminal(io.StringIO):
    """What somebody looks at."""

    def isatty(self):
        return True


@pytest.fixture(autouse=True)
def _nobody_was_told(monkeypatch):
    """As a process begins, but that nothing takes long."""
    monkeypatch.delenv("NUMKV_PROGRESS", raising=False)
    monkeypatch.setattr(builder, "LONG", 1e9)
    monkeypatch.setattr(builder, "_is_told", threading.Event())


@pytest.fixture
def compile_(tmp_path, monkeypatch):
    """A function that builds a small kernel, from a folder of the test's own, and says whether it was compiled.

    Its argument stands in for stderr: pytest puts its own in the place of one that a fixture sets.
    """
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(builder, "_stats", dict(builder._stats))

    def add(x):
        return x + 1

    def compile_(stderr):
        before = builder.cache_stats()
        with contextlib.redirect_stderr(stderr):
            built = builder.build(add, (types.int64,), label="something")
        assert built(2) == 3
        return builder.cache_stats()["misses"] > before["misses"]

    return compile_


@pytest.fixture
def terminal():
    """A terminal to stand in for stderr."""
    return Terminal()


@pytest.fixture
def file():
    """A file to stand in for stderr."""
    return io.StringIO()


def test_a_terminal_is_told_before_and_only_if_something_is_compiled(compile_, terminal):
    assert compile_(terminal)
    assert terminal.getvalue().startswith(LINE)
    terminal.truncate(0)
    assert not compile_(terminal)
    assert terminal.getvalue() == ""


def test_how_to_be_rid_of_the_lines_is_told_once(compile_, terminal):
    builder._explain.cache_clear()
    compile_(terminal)
    with contextlib.redirect_stderr(terminal):
        builder.tell("something else")
    first, explained, *rest = terminal.getvalue().splitlines()
    assert first + "\n" == LINE
    assert "NUMKV_PROGRESS=0" in explained
    assert "numkv warmup" in explained
    assert rest == ["numkv: compiling something else"]


def test_what_is_no_terminal_is_told_once_when_it_takes_long(compile_, file, monkeypatch):
    """In the middle of it, by a thread that is gone afterwards."""
    builder._explain.cache_clear()
    assert compile_(file)
    assert file.getvalue() == ""
    monkeypatch.setattr(builder, "LONG", 0.0)

    def timers():
        return [thread for thread in threading.enumerate() if isinstance(thread, threading.Timer)]

    with contextlib.redirect_stderr(file):
        with builder.compiled("something"):
            assert builder._is_told.wait(60)
        while timers():
            time.sleep(0.001)
        with builder.compiled("something else"):
            assert not timers()
    told, explained = file.getvalue().splitlines()
    assert "something;" in told
    assert "NUMKV_PROGRESS=1" in told
    assert "numkv warmup" in explained
    assert "NUMKV_PROGRESS=0" in explained


class AtOnce:
    """A timer whose time is over when it starts."""

    def __init__(self, interval, function, args):
        self.start = lambda: function(*args)

    def cancel(self):
        pass


def test_who_was_told_or_wants_silence_is_not_told_that_it_takes_long(
    terminal, file, monkeypatch, caplog
):
    monkeypatch.setattr(builder.threading, "Timer", AtOnce)
    with contextlib.redirect_stderr(terminal), builder.compiled("something"):
        pass
    with caplog.at_level(logging.INFO, logger="numkv.kernels"), builder.compiled("something"):
        pass
    monkeypatch.setenv("NUMKV_PROGRESS", "0")
    with contextlib.redirect_stderr(file), builder.compiled("something"):
        pass
    assert not builder._is_told.is_set()
    assert file.getvalue() == ""


def test_where_no_thread_is_to_be_had(compile_, file, monkeypatch):
    def none(self):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Timer, "start", none)
    assert compile_(file)
    assert file.getvalue() == ""


@pytest.mark.parametrize(("choice", "is_told"), [("1", True), ("0", False), ("", False)])
def test_the_environment_chooses(compile_, file, monkeypatch, choice, is_told):
    monkeypatch.setenv("NUMKV_PROGRESS", choice)
    assert compile_(file)
    assert (LINE in file.getvalue()) == is_told


def test_silence_on_a_terminal(compile_, terminal, monkeypatch):
    monkeypatch.setenv("NUMKV_PROGRESS", "0")
    assert compile_(terminal)
    assert terminal.getvalue() == ""


def test_a_notebook_is_told(compile_, file, monkeypatch):
    """Its stderr is no terminal, but Python is interactive."""
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    assert compile_(file)
    assert LINE in file.getvalue()


def test_who_listens_to_the_log_is_told_there(compile_, terminal, caplog):
    with caplog.at_level(logging.INFO, logger="numkv.kernels"):
        assert compile_(terminal)
        assert not compile_(terminal)
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0] == "compiling something"
    assert messages[1].startswith("compiled something in ")
    assert len(messages) == 2
    assert terminal.getvalue() == ""


def test_commands_show_it_in_their_own_line_alone(compile_, terminal, monkeypatch):
    monkeypatch.setenv("NUMKV_PROGRESS", "1")
    with kernel_progress() as progress:
        assert compile_(terminal)
        assert progress.detail == "something"
    assert LINE not in terminal.getvalue()


@pytest.mark.parametrize("choice", ["", "1"])
@pytest.mark.parametrize("is_there", [False, True], ids=["none", "closed"])
def test_no_stderr_is_no_reason_to_fail(compile_, file, monkeypatch, capsys, choice, is_there):
    file.close()
    monkeypatch.setenv("NUMKV_PROGRESS", choice)
    assert compile_(file if is_there else None)
    assert capsys.readouterr().out == ""


def test_no_folder_for_kernels_is_told_too(compile_, terminal, monkeypatch):
    def no_folder(*args):
        raise RuntimeError("no locator available")

    monkeypatch.setattr(builder, "KernelCache", no_folder)
    monkeypatch.setattr(builder, "warn_no_cache", lambda reason: None)
    for _ in range(2):
        assert compile_(terminal)
    assert terminal.getvalue().count(LINE) == 2
