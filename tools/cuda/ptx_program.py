"""A parser of PTX into instructions, basic blocks and sizes, for `tools.cuda.ptx_machine`.

It supports the PTX of NVVM for Numba's kernels: one entry, and few functions. Anything else is an error.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from tools.cuda.ptx_inline import inlined

__all__ = ["BITS", "Instruction", "Param", "Program", "PtxError", "parse"]

#: Bits of a type; a predicate counts as 1 bit.
BITS = {f"{letter}{bits}": bits for letter in "usfb" for bits in (8, 16, 32, 64)} | {
    "pred": 1,
    "f16x2": 32,
}

#: Generic addresses of shared and local memory: above the addresses of a process.
SHARED_WINDOW, LOCAL_WINDOW = 1 << 56, 2 << 56
#: First byte of a kernel's shared memory, so that a null pointer is invalid.
SHARED_START = 1024


class PtxError(Exception):
    """PTX that the interpreter does not support, or an error of a kernel."""


class Instruction(NamedTuple):
    """An instruction, as written."""

    predicate: str  #: the register of the condition; empty for none
    negated: bool  #: runs where that is false
    opcode: str  #: with all of its parts, as in ``add.s64``
    operands: tuple[str, ...]
    text: str

    @property
    def parts(self) -> list[str]:
        """The opcode's parts."""
        return self.opcode.split(".")


class Param(NamedTuple):
    """A parameter of the entry."""

    name: str
    size: int


@dataclass
class Program:
    """A kernel."""

    name: str
    params: list[Param]
    registers: dict[str, str]  #: name of a register to its type
    shared: dict[str, int]  #: name of a shared array to its address
    shared_end: int  #: where dynamic shared memory starts
    local: dict[str, int]  #: name of a local array to its offset
    local_bytes: int
    code: list[Instruction]
    labels: dict[str, int]
    blocks: dict[int, int] = field(default_factory=dict)  #: start of a basic block to its end

    def barriers(self) -> list[int]:
        """Return the instructions at which threads wait for each other, or for their copies."""
        return [i for i, x in enumerate(self.code) if is_barrier(x) or is_wait(x)]

    def without(self, number: int) -> Program:
        """The program with an instruction left out."""
        code = list(self.code)
        code[number] = Instruction("", False, "nop", (), "// left out: " + code[number].text)
        return Program(
            self.name, self.params, self.registers, self.shared, self.shared_end, self.local, self.local_bytes,
            code, self.labels, _blocks(code, self.labels),
        )  # fmt: skip


def is_barrier(x: Instruction) -> bool:
    """Whether all threads of a block wait here."""
    return x.opcode.startswith(("bar.sync", "barrier.sync", "barrier.cta.sync"))


def is_wait(x: Instruction) -> bool:
    """Whether a thread waits here for copies that it has started."""
    return x.opcode.startswith("cp.async.wait")


def parse(text: str) -> Program:
    """Read the one entry of a module.

    Parameters
    ----------
    text : str
        PTX.

    Raises
    ------
    PtxError
        If there is not exactly one entry, or a directive is not known.
    """
    text = re.sub(r"//[^\n]*|/\*.*?\*/", "", text, flags=re.S)
    entries = re.findall(r"\.entry\s+([\w$]+)\s*\((.*?)\)([^{;]*)\{", text, re.S)
    if len(entries) != 1:
        raise PtxError(f"expected one entry, got {len(entries)}")
    name, params, _ = entries[0]
    start = text.index("{", text.index(".entry")) + 1
    try:
        body = inlined(text, text[start : text.index("\n}", start)])
    except ValueError as error:
        raise PtxError(str(error)) from error
    reader = _Body(body)
    shared, end = _shared(text)
    program = Program(
        name, _params(params), reader.registers, shared, end, reader.local, reader.local_bytes, reader.code,
        reader.labels,
    )  # fmt: skip
    program.blocks = _blocks(program.code, program.labels)
    return program


def _params(text: str) -> list[Param]:
    found = []
    for part in filter(None, (p.strip() for p in text.split(","))):
        match = re.fullmatch(
            r"\.param\s+(?:\.align\s+\d+\s+)?\.(\w+)\s+(?:\.ptr\s+.*?)?([\w$]+)(?:\[(\d+)\])?",
            part,
            re.S,
        )
        if not match:
            raise PtxError(f"parameter: {part}")
        found.append(Param(match[2], BITS[match[1]] // 8 * int(match[3] or 1)))
    return found


def _shared(text: str) -> tuple[dict[str, int], int]:
    """Return the addresses of shared arrays, and the start of dynamic shared memory."""
    found, dynamic, end = {}, [], SHARED_START
    for match in re.finditer(
        r"\.shared\s+(?:\.align\s+(\d+)\s+)?\.(\w+)\s+([\w$]+)(?:\[(\d*)\])?\s*;", text
    ):
        align, of, name, count = int(match[1] or 1), match[2], match[3], match[4]
        if count == "":
            dynamic.append(name)
            continue
        end = -(-end // align) * align
        found[name] = end
        end += BITS[of] // 8 * int(count or 1)
    end = -(-end // 16) * 16
    return found | dict.fromkeys(dynamic, end), end


class _Body:
    """Parses the text between an entry's braces."""

    def __init__(self, text: str) -> None:
        self.registers: dict[str, str] = {}
        self.local: dict[str, int] = {}
        self.local_bytes = 0
        self.code: list[Instruction] = []
        self.labels: dict[str, int] = {}
        # Operands may have braces, but none has a semicolon; labels end in a colon.
        for statement in text.replace("\n", " ").replace("\t", " ").split(";"):
            self._read(statement.strip())

    def _read(self, s: str) -> None:
        # Braces around statements are scopes of registers, whose names NVVM gives one type each.
        while match := re.match(r"(?:([$\w]+)\s*:|[{}])\s*", s):
            if match[1]:
                self.labels[match[1]] = len(self.code)
            s = s[match.end() :]
        if not s or s.startswith((".pragma", ".loc ", ".file", ".shared")):  # `_shared` reads those
            return
        if s.startswith(".reg"):
            self._declare(s)
        elif s.startswith(".local"):
            match = re.fullmatch(r"\.local\s+\.align\s+(\d+)\s+\.b8\s+([\w$]+)\[(\d+)\]", s)
            if not match:
                raise PtxError(s)
            align = int(match[1])
            self.local_bytes = -(-self.local_bytes // align) * align
            self.local[match[2]] = self.local_bytes
            self.local_bytes += int(match[3])
        elif s.startswith("."):
            raise PtxError(f"unknown directive: {s[:80]}")
        else:
            self.code.append(_instruction(s))

    def _declare(self, s: str) -> None:
        match = re.fullmatch(r"\.reg\s+\.(\w+)\s+(.*)", s)
        if not match or match[1] not in BITS:
            raise PtxError(s)
        for part in match[2].split(","):
            many = re.fullmatch(r"(%[\w$]+)<(\d+)>", part.strip())
            names = [f"{many[1]}{i}" for i in range(int(many[2]))] if many else [part.strip()]
            if any(self.registers.get(name, match[1]) != match[1] for name in names):
                raise PtxError(f"registers of one name and two types: {s}")
            self.registers.update(dict.fromkeys(names, match[1]))


def _instruction(s: str) -> Instruction:
    text, predicate, negated = s, "", False
    if match := re.match(r"@(!?)(%\w+)\s+", s):
        negated, predicate, s = match[1] == "!", match[2], s[match.end() :]
    opcode, _, rest = s.partition(" ")
    operands, depth, at = [], 0, ""
    for letter in rest:
        depth += (letter in "{[") - (letter in "}]")
        if letter == "," and depth == 0:
            operands.append(at.strip())
            at = ""
        else:
            at += letter
    if at.strip():
        operands.append(at.strip())
    return Instruction(predicate, negated, opcode, tuple(operands), text)


def ends_block(x: Instruction) -> bool:
    """Return whether the next instruction does not always follow this one."""
    return x.opcode.startswith(("bra", "ret", "exit", "trap")) or is_barrier(x)


def _blocks(code: list[Instruction], labels: dict[str, int]) -> dict[int, int]:
    starts = {0, *labels.values()} | {i + 1 for i, x in enumerate(code) if ends_block(x)}
    ordered = sorted(i for i in starts if i < len(code))
    return dict(zip(ordered, [*ordered[1:], len(code)], strict=True))
