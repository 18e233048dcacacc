"""Loops in compiled code: basic blocks of LLVM and of assembly (x86-64, AArch64), and which of them run repeatedly."""

from __future__ import annotations

import re

_JUMP = re.compile(r"^(?:j\w+|b(?:\.\w+)?|cbn?z\s+\w+,|tbn?z\s+\w+,\s*#\d+,)\s+(\.LBB\w+)$")
_LABEL = re.compile(r"^(\.LBB\w+):")
_CALL = re.compile(r"^(callq?|blr?)\b")


class Blocks:
    """The basic blocks of one function.

    Parameters
    ----------
    code : dict of str to list of str
        Instructions by block.
    successors : dict of str to set of str
        Which blocks may come next.
    """

    def __init__(self, code, successors):
        self.code, self.successors = code, successors

    def loops(self, among=None):
        """Sets of blocks that reach each other, outermost loops only."""
        among = set(self.code) if among is None else among
        backwards = {block: set() for block in among}
        for block in among:
            for after in self.successors[block] & among:
                backwards[after].add(block)
        # Kosaraju's algorithm: in reverse order of leaving blocks, every block that reaches one is in a loop with it.
        order, seen = [], set()
        for start in among:
            todo = [] if start in seen else [(start, iter(self.successors[start] & among))]
            seen.add(start)
            while todo:
                block, others = todo[-1]
                new = next((other for other in others if other not in seen), None)
                if new is None:
                    order.append(todo.pop()[0])
                else:
                    seen.add(new)
                    todo.append((new, iter(self.successors[new] & among)))
        loops, taken = [], set()
        for start in reversed(order):
            if start in taken:
                continue
            loop, todo = {start}, [start]
            while todo:
                new = backwards[todo.pop()] - loop - taken
                loop |= new
                todo += new
            taken |= loop
            if len(loop) > 1 or start in self.successors[start]:
                loops.append(loop)
        return loops

    def innermost(self, among=None):
        """Loops with no loop in them."""
        found = []
        for loop in self.loops(among):
            heads = {b for a in set(self.code) - loop for b in self.successors[a] & loop}
            inner = self.loops(loop - heads) if heads else []
            found += self.innermost(loop - heads) if inner else [loop]
        return found

    def lines(self, loop):
        """The instructions of a loop."""
        return [line for block in loop for line in self.code[block]]


def of_assembly(text, name):
    """The blocks of the function whose label is `name`."""
    lines = text[text.index(f"\n{name}:\n") + len(name) + 3 :].split("\n.Lfunc_end")[0].split("\n")
    code, successors, here = {"entry": []}, {"entry": set()}, "entry"
    falls_through = True
    for line in (line.strip() for line in lines):
        label = _LABEL.match(line)
        if label:
            if falls_through:
                successors[here].add(label[1])
            here, falls_through = label[1], True
            code[here], successors[here] = [], set()
        elif line and not line.startswith((".", "#", "//")):
            jump = _JUMP.match(line)
            if jump:
                successors[here].add(jump[1])
            elif line.startswith(("j", "br\t")):
                raise ValueError(f"a jump to somewhere unknown: {line}")
            code[here].append(line)
            # What stands behind a jump without a label is never reached.
            falls_through = not line.startswith(("jmp", "ret", "ud2", "b\t", "brk"))
    return Blocks(code, successors)


def of_llvm(text, name):
    """The blocks of the function `name` of a module."""
    text = text[re.search(rf"^define [^\n]*@\"?{re.escape(name)}\"?\(", text, re.M).start() :]
    code, successors, here = {"entry": []}, {"entry": set()}, "entry"
    for line in text[: text.index("\n}")].split("\n")[1:]:
        label = re.match(r'^"?([^"\s:]+)"?:', line)
        if label:
            if code == {"entry": []}:  # it is the name of the first
                code, successors = {}, {}
            here = label[1]
            code[here], successors[here] = [], set()
        elif line.strip():
            code[here].append(line.strip())
            successors[here] |= set(re.findall(r'label %"?([^"\s,]+)"?', line))
    return Blocks(code, successors)


def calls(lines):
    """The lines that call another function, of assembly."""
    return [line for line in lines if _CALL.match(line)]


def called(lines):
    """Names of the functions that LLVM lines call, but for LLVM's own."""
    names = [m for line in lines for m in re.findall(r'\bcall\b[^@]*@"?([^"(\s]+)"?\(', line)]
    return {name for name in names if not name.startswith("llvm.")}
