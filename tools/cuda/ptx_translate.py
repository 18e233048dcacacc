"""PTX instructions as lines of Python over NumPy arrays, an element for each thread, for `tools.cuda.ptx_machine`.

A basic block becomes two functions: for all threads, and for those of a mask ``M``. A register is one array with views
of other types: ``%r5`` is ``r5_u32``, ``r5_s32`` or ``r5_f32``. Constants are NumPy scalars, so that values are not
promoted. Unknown PTX raises `PtxError`.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np

from tools.cuda import ptx_arithmetic as arithmetic
from tools.cuda.ptx_program import BITS, LOCAL_WINDOW, SHARED_WINDOW, Instruction, Program, PtxError

__all__ = ["SPECIAL", "Translator", "dtype_of", "reads_and_writes"]

#: Special registers that `ptx_machine` fills.
SPECIAL = {f"%{name}.{axis}" for name in ("tid", "ntid", "ctaid", "nctaid") for axis in "xyz"} | {
    "%laneid", "%warpid", "%dynamic_smem_size", "%total_smem_size", "%lanemask_lt",
}  # fmt: skip

UFUNCS = {
    "add": "np.add", "sub": "np.subtract", "mul": "np.multiply", "and": "np.bitwise_and", "or": "np.bitwise_or",
    "xor": "np.bitwise_xor",
}  # fmt: skip
PREDICATES = {
    "and": "np.logical_and",
    "or": "np.logical_or",
    "xor": "np.logical_xor",
    "not": "np.logical_not",
}
ROUNDINGS = {"rn", "rz", "rm", "rp", "ftz", "approx", "full", "sat", "rni", "rzi", "rmi", "rpi"}
NOTHING = ("membar", "fence", "nop", "discard", "prefetch", "prefetchu")


def dtype_of(of: str) -> Any:
    """The NumPy dtype of a PTX type; b types are unsigned."""
    if of == "pred":
        return np.bool_
    letter, bits = of[0], BITS[of]
    return np.dtype({"f": "f", "s": "i"}.get(letter, "u") + str(bits // 8)).type


def registers_in(operand: str) -> list[str]:
    """The registers that an operand names."""
    return [r for r in re.findall(r"%[\w.$]+", operand) if r not in SPECIAL]


def reads_and_writes(x: Instruction) -> tuple[list[str], list[str]]:
    """The registers that an instruction reads, and those that it sets."""
    first = (
        0
        if x.opcode.startswith(("st", "bra", "bar", "ret", "red", "nop", "cp.", "membar", "fence"))
        else 1
    )
    writes = [r for operand in x.operands[:first] for r in registers_in(operand)]
    reads = [r for operand in x.operands[first:] for r in registers_in(operand)]
    return reads + ([x.predicate] if x.predicate else []), writes


class Translator:
    """Makes the lines of a program; gathers the names that they use.

    Attributes
    ----------
    views : dict of str to (str, str)
        Names of arrays: register and type of each.
    constants : dict of str to object
        Names of constants.
    """

    def __init__(self, program: Program, tracked: set[str]) -> None:
        self.program = program
        self.tracked = tracked  #: registers that a path leaves unset
        self.views: dict[str, tuple[str, str]] = {}
        self.constants: dict[str, Any] = {}
        self.specials: dict[str, str] = {}
        self.params: dict[str, tuple[str, int, str]] = {}

    # -- operands

    def view(self, register: str, of: str) -> str:
        """The name of a register's array, seen as a type of the same size."""
        name = re.sub(r"\W", "_", register[1:]) + "_" + of.replace("b", "u")
        self.views[name] = (register, of)
        return name

    def constant(self, value: Any) -> str:
        """The name of a constant."""
        bits = value.tobytes().hex()
        name = f"c_{value.dtype.name}_{bits}"
        self.constants[name] = value
        return name

    def read(self, operand: str, of: str) -> str:
        """An expression for an operand, of the dtype of a type."""
        program, dtype = self.program, dtype_of(of)
        if operand in program.registers:
            declared = program.registers[operand]
            if BITS[declared] == BITS[of]:
                return self.view(operand, of)
            if BITS[declared] < BITS[of]:
                raise PtxError(f"{operand} is narrower than {of}")
            whole = self.view(operand, f"u{BITS[declared]}")
            narrow = f"{whole}.astype(np.uint{BITS[of]})"
            return narrow if of[0] in "ub" else f"{narrow}.view(np.{np.dtype(dtype).name})"
        if operand in SPECIAL:
            name = "special_" + re.sub(r"\W", "_", operand[1:])
            self.specials[name] = operand
            return name if BITS[of] == 32 else f"{name}.astype(np.{np.dtype(dtype).name})"
        if operand in program.shared or operand in program.local:
            places = program.shared if operand in program.shared else program.local
            return self.constant(dtype(places[operand]))
        return self.constant(self._number(operand, of, dtype))

    @staticmethod
    def _number(operand: str, of: str, dtype: Any) -> Any:
        if operand.startswith(("0f", "0F")):
            return np.uint32(int(operand[2:], 16)).view(np.float32).view(dtype)
        if operand.startswith(("0d", "0D")):
            return np.uint64(int(operand[2:], 16)).view(np.float64).view(dtype)
        if of == "pred":
            return np.bool_(int(operand))
        try:
            value = int(operand.rstrip("U"), 0)
        except ValueError:
            raise PtxError(f"unknown operand: {operand}") from None
        bits = BITS[of]
        return np.array(value & ((1 << bits) - 1), f"u{bits // 8}").view(dtype)[()]

    def target(self, register: str, of: str) -> str:
        """The array that takes a value of a type: a wider register extends it by its sign."""
        declared = self.program.registers[register]
        if declared == "pred" or BITS[declared] == BITS[of]:
            return self.view(register, of if declared != "pred" else "pred")
        if BITS[declared] < BITS[of] or of[0] == "f":
            raise PtxError(f"{register} does not hold {of}")
        return self.view(register, ("s" if of[0] == "s" else "u") + str(BITS[declared]))

    # -- lines

    def lines(self, at: int, masked: bool) -> list[str]:
        """The lines of an instruction; `masked` if some threads do not run it."""
        x = self.program.code[at]
        if x.predicate:
            raise PtxError(f"only branches may have a predicate: {x.text}")
        reads, writes = reads_and_writes(x)
        lines = []
        # A move of an uninitialised value is no error yet: its mark moves with it.
        moved = x.opcode.startswith("mov") and len(reads) == 1 and len(writes) == 1
        for register in dict.fromkeys(r for r in reads if r in self.tracked and not moved):
            lines.append(f"unset({self.view(register, 'set')}, {'M' if masked else 'None'}, {at})")
        lines += self._lines(x, at, masked)
        for register in (r for r in writes if r in self.tracked):
            mark = self.view(reads[0], "set") if moved and reads[0] in self.tracked else "True"
            name = self.view(register, "set")
            lines.append(
                f"np.copyto({name}, {mark}, where=M)" if masked else f"{name}[...] = {mark}"
            )
        return lines

    def _put(self, register: str, of: str, expression: str, masked: bool) -> list[str]:
        name = self.target(register, of)
        if masked:
            return [f"np.copyto({name}, {expression}, where=M, casting='unsafe')"]
        return [f"{name}[...] = {expression}"]

    def _call(
        self, function: str, register: str, of: str, args: list[str], masked: bool
    ) -> list[str]:
        """A NumPy function whose result has the dtype of a type."""
        if BITS[self.program.registers[register]] != BITS[of] and of != "pred":
            return self._put(register, of, f"{function}({', '.join(args)})", masked)
        where = ", where=M" if masked else ""
        return [f"{function}({', '.join(args)}, out={self.target(register, of)}{where})"]

    def _lines(self, x: Instruction, at: int, masked: bool) -> list[str]:
        parts, first = x.parts, x.parts[0]
        if first in NOTHING:
            return []
        if first in ("ld", "st", "ldu"):
            return self._memory(x, at, masked)
        if first in ("atom", "red"):
            return self._atomic(x, at, masked)
        if first in ("cp", "ldmatrix", "mma", "movmatrix"):
            return self._tensor(x, at, masked)
        if first in ("shfl", "vote", "activemask") or x.opcode.startswith("bar.warp"):
            return self._warp(x, at, masked)
        method = getattr(self, f"_{first}", None)
        if method is not None:
            return method(x, parts, masked)
        return self._plain(x, parts, masked)

    def _plain(self, x: Instruction, parts: list[str], masked: bool) -> list[str]:
        """Functions of one or more values of one type."""
        first, of = parts[0], parts[-1]
        if of not in BITS:
            raise PtxError(f"unknown instruction: {x.text}")
        modes = set(parts[1:-1])
        to, args = x.operands[0], [self.read(o, of) for o in x.operands[1:]]
        if of == "pred" and first in PREDICATES:
            return self._call(PREDICATES[first], to, of, args, masked)
        if "sat" in modes:
            raise PtxError(f"unknown instruction: {x.text}")
        if first in UFUNCS and modes <= {"rn", "ftz"} and not (first == "mul" and of[0] != "f"):
            return self._call(UFUNCS[first], to, of, args, masked)
        if first in ("min", "max") and modes <= {"NaN", "ftz"}:
            name = first + "imum" if of[0] != "f" or "NaN" in modes else "f" + first
            return self._call(f"np.{name}", to, of, args, masked)
        if first in ("neg", "abs", "not") and modes <= {"ftz"}:
            name = {"neg": "np.negative", "abs": "np.absolute", "not": "np.invert"}[first]
            return self._call(name, to, of, args, masked)
        if first == "copysign":
            return self._call("np.copysign", to, of, args[::-1], masked)
        if first in arithmetic.FUNCTIONS and of[0] == "f" and modes <= {"approx", "ftz", "rn"}:
            return self._put(to, of, f"function_{first}({args[0]})", masked)
        if first == "testp" and parts[1] in ("finite", "infinite", "notanumber", "number"):
            test = {
                "finite": "np.isfinite",
                "infinite": "np.isinf",
                "notanumber": "np.isnan",
                "number": "~np.isnan",
            }
            return self._put(to, "pred", f"{test[parts[1]]}({args[0]})", masked)
        if first in ("popc", "clz", "brev"):
            name = {"popc": "count_ones", "clz": "leading_zeros", "brev": "reversed_bits"}[first]
            return self._put(to, "u32" if first != "brev" else of, f"{name}({args[0]})", masked)
        raise PtxError(f"unknown instruction: {x.text}")

    def _mov(self, x: Instruction, parts: list[str], masked: bool) -> list[str]:
        of, (to, source) = parts[-1], x.operands
        if to.startswith("{"):
            pieces = [p.strip() for p in to.strip("{}").split(",")]
            bits = BITS[of] // len(pieces)
            whole = self.read(source, f"u{BITS[of]}")
            lines = []
            for i, piece in enumerate(pieces):
                if piece != "_":
                    value = f"({whole} >> np.uint{BITS[of]}({i * bits})).astype(np.uint{bits})"
                    lines += self._put(piece, f"u{bits}", value, masked)
            return lines
        if source.startswith("{"):
            pieces = [p.strip() for p in source.strip("{}").split(",")]
            bits, wide = BITS[of] // len(pieces), f"np.uint{BITS[of]}"
            terms = [
                f"({self.read(p, f'u{bits}')}.astype({wide}) << {wide}({i * bits}))"
                for i, p in enumerate(pieces)
            ]
            return self._put(to, f"u{BITS[of]}", " | ".join(terms), masked)
        kept = of if of == "pred" else f"u{BITS[of]}"
        return self._put(to, kept, self.read(source, kept), masked)

    def _cvta(self, x: Instruction, parts: list[str], masked: bool) -> list[str]:
        window = {
            "global": 0,
            "shared": SHARED_WINDOW,
            "local": LOCAL_WINDOW,
            "param": 0,
            "const": 0,
        }
        space = next(p for p in parts if p in window)
        value = self.read(x.operands[1], "u64")
        if window[space]:
            sign = "-" if "to" in parts else "+"
            value = f"{value} {sign} {self.constant(np.uint64(window[space]))}"
        return self._put(x.operands[0], "u64", value, masked)

    def _setp(self, x: Instruction, parts: list[str], masked: bool) -> list[str]:
        comparison, of = parts[1], parts[-1]
        if set(parts[2:-1]) - {"ftz", "and", "or", "xor"} or "|" in x.operands[0]:
            raise PtxError(f"unknown instruction: {x.text}")
        a, b = (self.read(o, of) for o in x.operands[1:3])
        name = "different" if comparison == "ne" and of[0] == "f" else f"compare_{comparison}"
        if comparison == "ne" and of[0] != "f":
            name = "np.not_equal"
        value = f"{name}({a}, {b})"
        combined = next((p for p in parts[2:-1] if p in ("and", "or", "xor")), None)
        if combined:
            value = f"{PREDICATES[combined]}({value}, {self.read(x.operands[3], 'pred')})"
        return self._put(x.operands[0], "pred", value, masked)

    def _selp(self, x: Instruction, parts: list[str], masked: bool) -> list[str]:
        of = f"u{BITS[parts[-1]]}"
        a, b = (self.read(o, of) for o in x.operands[1:3])
        return self._put(
            x.operands[0], of, f"np.where({self.read(x.operands[3], 'pred')}, {a}, {b})", masked
        )

    def _shl(self, x: Instruction, parts: list[str], masked: bool) -> list[str]:
        of = f"u{BITS[parts[-1]]}"
        return self._put(x.operands[0], of, self._shift("shift_left", x, of), masked)

    def _shr(self, x: Instruction, parts: list[str], masked: bool) -> list[str]:
        of = parts[-1].replace("b", "u")
        return self._put(x.operands[0], of, self._shift("shift_right", x, of), masked)

    def _shift(self, name: str, x: Instruction, of: str) -> str:
        value, by = self.read(x.operands[1], of), x.operands[2]
        if by.isdigit() and int(by) < BITS[of]:  # most are
            ufunc = "np.left_shift" if name == "shift_left" else "np.right_shift"
            return f"{ufunc}({value}, {self.constant(dtype_of(of)(int(by)))})"
        return f"{name}({value}, {self.read(by, 'u32')})"

    def _shf(self, x: Instruction, parts: list[str], masked: bool) -> list[str]:
        a, b, n = (self.read(o, "u32") for o in x.operands[1:])
        value = f"funnel({a}, {b}, {n}, {parts[1] == 'l'}, {parts[2] == 'wrap'})"
        return self._put(x.operands[0], "u32", value, masked)

    def _mul(self, x: Instruction, parts: list[str], masked: bool) -> list[str]:
        if parts[-1][0] == "f":
            return self._plain(x, parts, masked)
        return self._product(x, parts, masked, None)

    def _mad(self, x: Instruction, parts: list[str], masked: bool) -> list[str]:
        return self._product(x, parts, masked, x.operands[3])

    def _product(
        self, x: Instruction, parts: list[str], masked: bool, more: str | None
    ) -> list[str]:
        mode, of = parts[1], parts[-1]
        a, b = (self.read(o, of) for o in x.operands[1:3])
        if mode == "lo":
            value = f"np.multiply({a}, {b})"
        elif mode == "wide":
            of = of[0] + str(2 * BITS[of])
            value = f"np.multiply({a}, {b}, dtype=np.{np.dtype(dtype_of(of)).name})"
        elif mode == "hi":
            value = f"high({a}, {b})"
        else:
            raise PtxError(f"unknown instruction: {x.text}")
        if more is not None:
            value = f"np.add({value}, {self.read(more, of)})"
        return self._put(x.operands[0], of, value, masked)

    def _div(self, x: Instruction, parts: list[str], masked: bool) -> list[str]:
        of = parts[-1]
        a, b = (self.read(o, of) for o in x.operands[1:])
        if of[0] == "f":
            return self._call("np.divide", x.operands[0], of, [a, b], masked)
        return self._put(x.operands[0], of, f"divide({a}, {b})", masked)

    def _rem(self, x: Instruction, parts: list[str], masked: bool) -> list[str]:
        of = parts[-1]
        a, b = (self.read(o, of) for o in x.operands[1:])
        return self._put(
            x.operands[0], of, f"np.subtract({a}, np.multiply(divide({a}, {b}), {b}))", masked
        )

    def _fma(self, x: Instruction, parts: list[str], masked: bool) -> list[str]:
        of, mode = parts[-1], next((p for p in parts[1:-1] if p in ("rn", "rm", "rp", "rz")), "rn")
        names = {"rn": "fma32", "rm": "fma32_down", "rp": "fma32_up", "rz": "fma32_zero"}
        if of in ("bf16x2", "f16x2") and parts[1:-1] == ["rn"]:
            args = ", ".join(self.read(o, "u32") for o in x.operands[1:])
            return self._put(x.operands[0], "u32", f"fma_pair('{of[:-2]}', {args})", masked)
        if of not in ("f32", "f64") or (of == "f64" and mode != "rn") or "sat" in parts:
            raise PtxError(f"unknown instruction: {x.text}")
        name = "fma64" if of == "f64" else names[mode]
        args = ", ".join(self.read(o, of) for o in x.operands[1:])
        return self._put(x.operands[0], of, f"{name}({args})", masked)

    def _cvt(self, x: Instruction, parts: list[str], masked: bool) -> list[str]:
        modes = [p for p in parts[1:] if p in ROUNDINGS]
        kinds = [p for p in parts[1:] if p not in ROUNDINGS]
        if kinds == ["bf16", "f32"] and modes == ["rn"]:
            return self._put(
                x.operands[0], "u16", f"to_bf16({self.read(x.operands[1], 'f32')})", masked
            )
        if kinds in (["bf16x2", "f32"], ["f16x2", "f32"]) and modes == ["rn"]:
            high, low = (self.read(o, "f32") for o in x.operands[1:])
            return self._put(
                x.operands[0], "u32", f"to_pair('{kinds[0][:-2]}', {low}, {high})", masked
            )
        if len(kinds) != 2 or any(k not in BITS for k in kinds):
            raise PtxError(f"unknown instruction: {x.text}")
        to, source = kinds
        value, dtype = self.read(x.operands[1], source), f"np.{np.dtype(dtype_of(to)).name}"
        whole = next((m for m in modes if m.endswith("i")), None)
        if to[0] != "f" and source[0] == "f":
            value = f"convert_to_int({value}, {dtype}, '{whole}')"
        elif to[0] == "f" and source[0] == "f" and whole:
            value = f"{ {'rni': 'np.rint', 'rzi': 'np.trunc', 'rmi': 'np.floor', 'rpi': 'np.ceil'}[whole] }({value})"
        elif "sat" in modes and to[0] == "f":
            value = f"np.clip(np.nan_to_num({value}), 0, 1).astype({dtype})"
        elif set(modes) - {"rn", "ftz"}:
            raise PtxError(f"unknown instruction: {x.text}")
        else:
            value = f"{value}.astype({dtype})"
        return self._put(x.operands[0], to, value, masked)

    def _prmt(self, x: Instruction, parts: list[str], masked: bool) -> list[str]:
        if len(parts) != 2:
            raise PtxError(f"unknown instruction: {x.text}")
        args = ", ".join(self.read(o, "u32") for o in x.operands[1:])
        return self._put(x.operands[0], "u32", f"permute({args})", masked)

    def _bfi(self, x: Instruction, parts: list[str], masked: bool) -> list[str]:
        of = f"u{BITS[parts[-1]]}"
        if not all(o.isdigit() for o in x.operands[3:]):
            raise PtxError(f"unknown instruction: {x.text}")
        a, b = (self.read(o, of) for o in x.operands[1:3])
        return self._put(
            x.operands[0], of, f"insert({a}, {b}, {', '.join(x.operands[3:])})", masked
        )

    def _bfe(self, x: Instruction, parts: list[str], masked: bool) -> list[str]:
        of = parts[-1]
        args = [self.read(x.operands[1], of), *(self.read(o, "u32") for o in x.operands[2:])]
        return self._put(x.operands[0], of, f"extract({', '.join(args)})", masked)

    def _lop3(self, x: Instruction, parts: list[str], masked: bool) -> list[str]:
        args = ", ".join(self.read(o, "u32") for o in x.operands[1:4])
        return self._put(x.operands[0], "u32", f"logic3({args}, {int(x.operands[4], 0)})", masked)

    # -- memory and other threads

    def _address(self, operand: str) -> tuple[str, int]:
        match = re.fullmatch(r"\[\s*([%\w$.]+)\s*(?:\+\s*(-?\d+))?\s*\]", operand)
        if not match:
            raise PtxError(f"unknown address: {operand}")
        register = self.program.registers.get(match[1])
        base = self.read(match[1], f"u{BITS[register]}" if register else "u64")
        return base, int(match[2] or 0)

    def _memory(self, x: Instruction, at: int, masked: bool) -> list[str]:
        parts, is_load = x.parts, x.parts[0] != "st"
        known = {
            "global",
            "shared",
            "local",
            "param",
            "const",
            "volatile",
            "relaxed",
            "nc",
            "weak",
            "cta",
            "gpu",
            "sys",
        }
        known |= {"ca", "cg", "cs", "lu", "cv", "wb", "wt", "L1::no_allocate", "v2", "v4"}
        if set(parts[1:-1]) - known or parts[-1] not in BITS:
            raise PtxError(f"unknown instruction: {x.text}")
        of, count = parts[-1], next((int(p[1:]) for p in parts if p in ("v2", "v4")), 1)
        space = next((p for p in parts if p in ("global", "shared", "local", "param")), "generic")
        registers, memory = (
            (x.operands[0], x.operands[1]) if is_load else (x.operands[1], x.operands[0])
        )
        names = [r.strip() for r in registers.strip("{}").split(",")]
        if space == "param":
            return self._param(names, memory, of, masked)
        base, offset = self._address(memory)
        size, mask = BITS[of] // 8, "M" if masked else "None"
        if not is_load:
            values = ", ".join(self.read(n, f"u{BITS[of]}") for n in names)
            return [f"store('{space}', {base}, {offset}, {size}, ({values},), {mask}, {at})"]
        lines = [f"got = load('{space}', {base}, {offset}, {size}, {count}, {mask}, {at})"]
        for i, name in enumerate(names):
            value = f"got[{i}].view(np.{np.dtype(dtype_of(of)).name})"
            lines.append(f"{self.target(name, of)}[{'M' if masked else '...'}] = {value}")
        return lines

    def _param(self, names: list[str], memory: str, of: str, masked: bool) -> list[str]:
        match = re.fullmatch(r"\[\s*([\w$]+)\s*(?:\+\s*(\d+))?\s*\]", memory)
        if not match or len(names) != 1:
            raise PtxError(f"unknown parameter: {memory}")
        offset = int(match[2] or 0)
        numbers = {p.name: i for i, p in enumerate(self.program.params)}
        name = f"param_{numbers[match[1]]}_{offset}_{of}"
        self.params[name] = (match[1], offset, of)
        return self._put(names[0], of, name, masked)

    def _atomic(self, x: Instruction, at: int, masked: bool) -> list[str]:
        parts = x.parts
        operation = next(
            (p for p in parts if p in ("add", "min", "max", "exch", "and", "or", "xor", "cas")),
            None,
        )
        space = next((p for p in parts if p in ("global", "shared")), "generic")
        if operation is None or parts[-1] not in BITS:
            raise PtxError(f"unknown instruction: {x.text}")
        of, memory = parts[-1], x.operands[0 if parts[0] == "red" else 1]
        base, offset = self._address(memory)
        values = [self.read(o, of) for o in x.operands[1 if parts[0] == "red" else 2 :]]
        mask = "M" if masked else "None"
        call = f"atomic('{space}', '{operation}', {base}, {offset}, ({', '.join(values)},), {mask}, {at})"
        if parts[0] == "red" or x.operands[0] == "_":
            return [call]
        return [
            f"got = {call}",
            f"{self.target(x.operands[0], of)}[{'M' if masked else '...'}] = got",
        ]

    def _warp(self, x: Instruction, at: int, masked: bool) -> list[str]:
        parts, mask = x.parts, "M" if masked else "None"
        if x.opcode.startswith("bar.warp.sync"):
            return [f"warp_sync({mask}, {self.read(x.operands[0], 'u32')}, {at})"]
        if parts[0] == "activemask":
            return self._put(x.operands[0], "u32", f"active_mask({mask})", masked)
        if parts[0] == "shfl" and parts[1] == "sync":
            to, _, also = x.operands[0].partition("|")
            args = ", ".join(self.read(o, "u32") for o in x.operands[1:])
            lines = [f"got = shuffle('{parts[2]}', {args}, {mask}, {at})"]
            lines += self._put(to, "u32", "got[0]", masked)
            return lines + (self._put(also, "pred", "got[1]", masked) if also else [])
        if parts[0] == "vote" and parts[1] == "sync" and parts[2] in ("any", "all", "ballot"):
            negated = x.operands[1].startswith("!")
            value = self.read(x.operands[1].lstrip("!"), "pred")
            value = f"np.logical_not({value})" if negated else value
            of = "u32" if parts[2] == "ballot" else "pred"
            call = f"vote('{parts[2]}', {value}, {self.read(x.operands[2], 'u32')}, {mask}, {at})"
            return self._put(x.operands[0], of, call, masked)
        raise PtxError(f"unknown instruction: {x.text}")

    def _tensor(self, x: Instruction, at: int, masked: bool) -> list[str]:
        """Return the lines for `ptx_tensor`: matrices in registers, and asynchronous copies."""
        mask = "M" if masked else "None"
        if x.opcode == "cp.async.commit_group":
            return [f"commit_copies({mask})"]
        if x.opcode == "cp.async.wait_group":
            return [f"wait_for_copies({int(x.operands[0])}, {mask})"]
        whole = {"cp.async.cg.shared.global": "16", "cp.async.ca.shared.global": "4"}.get(x.opcode)
        if whole is not None and x.operands[2] == whole:
            to, source = (self._address(o) for o in x.operands[:2])
            size = self.read(x.operands[3], "u32") if len(x.operands) > 3 else whole
            where = f"{to[0]}, {to[1]}, {source[0]}, {source[1]}"
            return [f"copy_async({where}, {whole}, {size}, {mask}, {at})"]
        names = [[r.strip() for r in o.strip("{}").split(",")] for o in x.operands]
        shape = re.fullmatch(
            r"ldmatrix\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared\.b16", x.opcode
        )
        if shape and len(names[0]) == int(shape[1]):
            base, offset = self._address(x.operands[1])
            more = f"{offset}, {shape[1]}, {bool(shape[2])}, {mask}, {at}"
            return self._parts(f"load_matrices({base}, {more})", names[0], "u32", masked)
        if x.opcode == "movmatrix.sync.aligned.m8n8.trans.b16":
            call = f"transpose_matrix({self.read(x.operands[1], 'u32')}, {mask}, {at})"
            return self._put(x.operands[0], "u32", call, masked)
        shape = re.fullmatch(
            r"mma\.sync\.aligned\.m16n8k16\.row\.col\.f32\.(bf16|f16)\.(\1)\.f32", x.opcode
        )
        if shape and [len(n) for n in names] == [4, 4, 2, 4]:
            args = [
                f"[{', '.join(self.read(n, of) for n in part)}]"
                for part, of in zip(names[1:], ("u32", "u32", "f32"), strict=True)
            ]
            call = f"multiply_matrices('{shape[1]}', {', '.join(args)}, {mask}, {at})"
            return self._parts(call, names[0], "f32", masked)
        raise PtxError(f"unknown instruction: {x.text}")

    def _parts(self, call: str, names: list[str], of: str, masked: bool) -> list[str]:
        """The lines that put a list of results into registers."""
        lines = [f"got = {call}"]
        for i, name in enumerate(names):
            lines += self._put(name, of, f"got[{i}]", masked)
        return lines
