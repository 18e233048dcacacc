"""The panel of a terminal: where it is drawn, what it says, and that it leaves the terminal as it was."""

import os
import re
import sys

import numpy as np
import pytest

import numkv
from numkv.cli import screen
from numkv.demo.cache import LayerCache


def screen_after(written, rows=24, columns=80):
    """What a terminal shows: cursor, saved cursor, margins and clearing, as the panel uses them."""
    shown = [" " * columns for _ in range(rows)]
    row, column, saved, margins = 0, 0, (0, 0), (0, rows - 1)
    for token in re.findall(r"\x1b\[[\d;]*[A-Za-z]|\x1b.|[^\x1b]", written, re.S):
        if token in ("\x1bD", "\n"):
            if row == margins[1]:
                del shown[margins[0]]
                shown.insert(margins[1], " " * columns)
            else:
                row += 1
            column = 0 if token == "\n" else column
        elif token == "\x1b7":
            saved = row, column
        elif token == "\x1b8":
            row, column = saved
        elif token.startswith("\x1b["):
            numbers = [int(n) for n in re.findall(r"\d+", token)]
            if token[-1] == "A":
                row -= numbers[0]
            elif token[-1] == "H":
                row, column = numbers[0] - 1, numbers[1] - 1
            elif token[-1] == "K":
                shown[row] = " " * columns
            elif token[-1] == "r":
                margins = (numbers[0] - 1, numbers[1] - 1) if numbers else (0, rows - 1)
                row = column = 0
            else:
                raise AssertionError(token)
        else:
            shown[row] = shown[row][:column] + token + shown[row][column + 1 :]
            column += 1
    return shown, (row, column), margins


def test_text_goes_on_above_the_panel(monkeypatch, capsys):
    monkeypatch.setattr(screen, "_size", lambda: (80, 24))
    monkeypatch.setattr(screen, "_SECONDS", 0)
    print("\n" * 22 + "a prompt ", end="")
    with screen.Live(lambda tokens, seconds, width: [f"{tokens} tokens", "x" * width]) as panel:
        for i in range(30):
            print(f"line {i}\n", end="")
            panel.token()
        inside = capsys.readouterr().out
        shown, at, margins = screen_after(inside)
        assert margins == (0, 24 - screen._LINES - 1)
        assert at == (margins[1], 0)
        assert shown[margins[1] - 1].startswith("line 29")
        assert shown[margins[1] + 1].startswith("30 tokens")
        assert shown[margins[1] + 2] == "x" * 79 + " "
    shown, at, margins = screen_after(inside + capsys.readouterr().out)
    assert margins == (0, 23)
    assert not "".join(shown[24 - screen._LINES :]).strip()
    assert at == (24 - screen._LINES - 1, 0)


def test_the_terminal_is_given_back_after_an_error(monkeypatch, capsys):
    monkeypatch.setattr(screen, "_size", lambda: (80, 24))
    with pytest.raises(KeyboardInterrupt), screen.Live(lambda *_: ["x"]):
        raise KeyboardInterrupt
    assert screen_after(capsys.readouterr().out)[2] == (0, 23)


def test_a_window_that_changes_its_size(monkeypatch, capsys):
    sizes = [(80, 24)]
    monkeypatch.setattr(screen, "_size", lambda: sizes[-1])
    monkeypatch.setattr(screen, "_SECONDS", 0)
    with screen.Live(lambda *_: ["here"]) as panel:
        sizes.append((60, 40))
        panel.token()
        assert "\x1b[1;33r" in capsys.readouterr().out


@pytest.mark.parametrize(("name", "value"), [("TERM", "dumb"), ("TERM", ""), ("NO_COLOR", "1")])
def test_plain_text_where_no_drawing_is_wanted(name, value, monkeypatch, capsys):
    pty = pytest.importorskip("pty")
    termios, fcntl = pytest.importorskip("termios"), pytest.importorskip("fcntl")
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, b"\x18\x00\x50\x00\x00\x00\x00\x00")  # 24 rows of 80
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with os.fdopen(slave, "w") as terminal, os.fdopen(master, "rb"):
        monkeypatch.setattr(sys, "stdout", terminal)
        assert screen._size() == (80, 24)
        monkeypatch.setenv(name, value)
        assert screen._size() is None
    monkeypatch.undo()
    with screen.Live(lambda *_: ["x"]) as panel:  # stdout is no terminal here
        panel.token()
    assert capsys.readouterr().out == ""


def test_what_the_panel_says():
    layers = [numkv.ContiguousLayer(40, 2, 8) for _ in range(3)]
    for layer in layers:
        layer.append(*np.ones((2, 10, 2, 8), np.float32))
    lines = screen.panel(LayerCache(layers))(10, 0.5, 60)
    assert lines[0].startswith("── 10 tokens generated, 20 a second; cache of 7.50 KiB ─")
    assert lines[1] == "tokens   " + "█" * 10 + "·" * 30 + "  10 of 40"
    assert all(len(line) <= 60 for line in lines)
    paged = numkv.PagedKVCache(1, 2, 8, num_blocks=20, block_size=4)
    for _ in range(9):
        paged.add()
    lines = screen.panel(paged)(1, 1.0, 70)
    assert len(lines) == screen._LINES
    assert "free" in lines[-1]
