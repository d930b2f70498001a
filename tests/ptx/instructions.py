"""What each PTX instruction does to a `Machine`.

`compiled` turns a program into functions. An opcode or a form that is not known here is refused by
its name, before anything runs.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable

import numpy as np

from ptx import values
from ptx.machine import WARP, Machine
from ptx.memory import Fault
from ptx.program import WIDTHS, Instruction, Program
from ptx.values import decode, encode, is_float, joined, pieces, unsigned

Step = Callable[[Machine], object]
Read = Callable[[Machine], np.ndarray]
Write = Callable[[Machine, np.ndarray], None]
NOTHING = ("fence", "createpolicy")
# Where lane l of a warp holds the elements of its registers, row-major (PTX ISA, m16n8k16): A and B
# in four and two registers of two halves, C and D in four numbers, or in two registers of halves.
_ROW, _PAIR = np.arange(WARP)[:, None] // 4, np.arange(WARP)[:, None] % 4 * 2 + (0, 1)
_A = np.stack([(_ROW + 8 * (i % 2)) * 16 + _PAIR + 8 * (i // 2) for i in range(4)])
_B = np.stack([(_PAIR + 8 * i) * 8 + _ROW for i in range(2)])
_C = np.stack([(_ROW + 8 * i) * 8 + _PAIR for i in range(2)])


class Refused(Exception):
    """An instruction that the interpreter does not know."""


def compiled(program: Program) -> list[Step | None]:
    """Return a function for each instruction; None is a barrier of the program."""
    return [_Compiler(program, line, at).step() for at, line in enumerate(program.instructions)]


class _Compiler:
    """One instruction and readers of its operands."""

    def __init__(self, program: Program, line: Instruction, at: int) -> None:
        self.program, self.line, self.at = program, line, at
        self.type = line.modifiers[-1] if line.modifiers else ""

    def step(self) -> Step | None:
        line = self.line
        if line.text.startswith("bar.sync"):
            return None
        if line.opcode in NOTHING or line.text.startswith("bar.warp.sync"):
            return lambda m: None
        if line.opcode in ("bra", "ret"):
            return self._branch()
        if line.opcode not in ("mul", "mad", "setp", "selp") and hasattr(self, f"_{line.opcode}"):
            return _guarded(getattr(self, f"_{line.opcode}")(), line)
        return _guarded(self._arithmetic(), line)

    # Operands

    def read(self, operand: str, type: str) -> Read:
        bits = unsigned(type)
        if operand.startswith("%") and "." in operand:
            return lambda m: decode(m.special[operand].astype(bits), type)
        if operand.startswith("%") or operand in self.program.widths:
            if self.program.width(operand) == WIDTHS[type] and type in values.PLAIN:
                kind = values.kind_of(type)
                return lambda m: m.registers[operand].view(kind)
            return lambda m: decode(m.registers[operand].astype(bits, copy=False), type)
        value = 0 if operand == "global_smem" else int(re.sub("^0f", "0x", operand.rstrip("U")), 0)
        value = bool(value) if type == "pred" else value & (1 << WIDTHS[type]) - 1
        constant = decode(np.full((1, 1), value, np.uint64).astype(bits), type)
        return lambda m: constant

    def reads(self, operand: str, type: str) -> list[Read]:
        return [self.read(register, type) for register in _registers(operand)]

    def write(self, register: str, type: str) -> Write:
        """Assign values; what is narrower than the register is extended, by its sign if it has."""
        register = register.split("|")[0]
        width, sign = self.program.width(register), type[0] if type[0] in "sp" else "b"
        own, wide = f"{sign}{WIDTHS[type]}", f"{sign}{width}"
        if width in (1, WIDTHS[type]):
            return lambda m, value: m.write(register, encode(value, type))
        return lambda m, value: m.write(register, encode(decode(encode(value, type), own), wide))

    def writes(self, operand: str, type: str) -> list[Write]:
        return [self.write(register, type) for register in _registers(operand)]

    def address(self, operand: str) -> Read:
        """Return int64 addresses of `[register + offset]`."""
        base, _, offset = operand.strip("[] ").partition("+")
        base = base.strip()
        wide = base.startswith("%") and self.program.width(base) == 64
        read, more = self.read(base, "s64" if wide else "u32"), int(offset or "0", 0)
        return lambda m: read(m).astype(np.int64) + more

    # Control flow

    def _branch(self) -> Step:
        to = self.program.labels[self.line.operands[0]] if self.line.operands else None

        def run(m: Machine) -> list:
            before = m.running()
            goes = m.full(before & _condition(m, self.line.guard)) if self.line.guard else before
            stays = (self.at + 1, before & ~goes)
            return [stays] if to is None else [(to, goes), stays]

        return run

    # Arithmetic

    def _arithmetic(self) -> Step:
        line, t = self.line, self.type
        if t not in WIDTHS or set(line.modifiers) - values.MODIFIERS:
            raise Refused(line.text)
        types, result = [t] * 4, t
        if line.opcode in ("mul", "mad") and not is_float(t):
            function, result = self._product()
            types[2] = result
        elif line.opcode == "setp":
            function, result = functools.partial(values.compare, line.modifiers[0]), "pred"
        elif line.opcode == "selp":
            function, types[2] = lambda x, y, which: np.where(which, x, y), "pred"
        else:
            name = ".".join([line.opcode, *(m for m in line.modifiers if m in ("relu", "NaN"))])
            function = (values.REALS if is_float(t) else values.INTEGERS).get(name)
            types[1:3] = ["u32"] * 2 if name in ("shl", "shr", "bfe") else types[1:3]
        if function is None or ("rz" in line.modifiers and t != "f32"):
            raise Refused(line.text)
        function = values.toward_zero(function) if "rz" in line.modifiers else function
        reads = [self.read(*each) for each in zip(line.operands[1:], types, strict=False)]
        writes = [self.write(register, result) for register in line.operands[0].split("|")]

        def compute(m: Machine) -> np.ndarray:
            return function(*[read(m) for read in reads])

        if len(writes) == 2:  # comparisons of both halves
            return lambda m: _write_all(m, writes, np.moveaxis(compute(m), -1, 0))
        return lambda m: writes[0](m, compute(m))

    def _product(self) -> tuple[Callable | None, str]:
        kind, bits = self.line.modifiers[0], WIDTHS[self.type]
        if kind == "lo":
            return lambda x, y, z=0: x * y + z, self.type
        if bits == 64:
            return None, self.type
        wide = f"{self.type[0]}{2 * bits}"
        dtype = values.kind_of(wide)
        if kind == "wide":
            return lambda x, y, z=0: x.astype(dtype) * y + z, wide
        return lambda x, y, z=0: (x.astype(dtype) * y >> bits).astype(x.dtype) + z, self.type

    def _mov(self) -> Step:
        to, source = self.line.operands
        n = max(len(_registers(to)), len(_registers(source)))
        part = f"b{WIDTHS[self.type] // n}"
        if n == 1:
            return self._arithmetic()
        if to.startswith("{"):
            read, writes = self.read(source, f"b{WIDTHS[self.type]}"), self.writes(to, part)
            return lambda m: _write_all(m, writes, np.moveaxis(pieces(read(m), n), -1, 0))
        reads, write = self.reads(source, part), self.write(to, f"b{WIDTHS[self.type]}")
        return lambda m: write(m, joined(np.stack(np.broadcast_arrays(*[r(m) for r in reads]), -1)))

    def _cvt(self) -> Step:
        to, source = self.line.modifiers[-2:]
        if set(self.line.modifiers) - values.MODIFIERS or "rz" in self.line.modifiers:
            raise Refused(self.line.text)
        write = self.write(self.line.operands[0], to)
        reads = [self.read(operand, source) for operand in self.line.operands[:0:-1]]
        if to.endswith("x2"):  # of two numbers the first is the upper half
            return lambda m: write(m, np.stack(np.broadcast_arrays(*[r(m) for r in reads]), -1))
        return lambda m: write(m, values.convert(reads[0](m), to, self.line.modifiers))

    # Lanes of a warp

    def _shfl(self) -> Step:
        kind, (to, source, by, limit, _) = self.line.modifiers[1], self.line.operands
        read, write, step = self.read(source, "b32"), self.write(to, "b32"), self.read(by, "u32")
        if limit != ("0" if kind == "up" else "31"):  # all lanes are one segment
            raise Refused(self.line.text)

        def run(m: Machine) -> None:
            lane, n = m.threads % WARP, step(m).astype(np.int64)
            near = {"bfly": lane ^ n, "up": lane - n, "idx": n + 0 * lane}[kind]
            near = np.where((near < 0) | (near >= WARP), lane, near) + m.threads - lane
            write(m, np.take_along_axis(m.full(read(m)), m.full(near), 1))

        return run

    def _redux(self) -> Step:
        to, source = self.line.operands[:2]
        read, write = self.read(source, self.type), self.write(to, self.type)
        function = values.INTEGERS[self.line.modifiers[1]]

        def run(m: Machine) -> None:
            warps = m.full(read(m)).reshape(-1, WARP)
            each = function.reduce(warps, axis=1, dtype=warps.dtype)
            write(m, np.repeat(each, WARP).reshape(m.shape))

        return run

    def _ldmatrix(self) -> Step:
        address = self.address(self.line.operands[1])
        writes = self.writes(self.line.operands[0], "b32")
        turned, n = "trans" in self.line.modifiers, len(writes)

        def run(m: Machine) -> None:
            running, at, stamps = _rows(m, address, n)
            rows = np.zeros((len(running), n, 8, 8), np.uint16)
            rows[running] = m.shared.read(at, 16, stamps).view(np.uint16).reshape(-1, n, 8, 8)
            words = np.ascontiguousarray(rows.swapaxes(2, 3) if turned else rows).view(np.uint32)
            _write_all(m, writes, words.swapaxes(0, 1).reshape(n, *m.shape))

        return run

    def _stmatrix(self) -> Step:
        address, reads = (
            self.address(self.line.operands[0]),
            self.reads(self.line.operands[1], "b32"),
        )
        turned, n = "trans" in self.line.modifiers, len(reads)

        def run(m: Machine) -> None:
            running, at, stamps = _rows(m, address, n)
            words = np.stack([m.full(read(m)).reshape(-1, 8, 4) for read in reads], 1)
            rows = words.view(np.uint16)[running]
            rows = np.ascontiguousarray(rows.swapaxes(2, 3) if turned else rows)
            m.shared.write(at, rows.reshape(-1, 8).view(np.uint8), stamps)

        return run

    def _mma(self) -> Step:
        line, kinds = self.line, self.line.modifiers[-4:]
        if "m16n8k16" not in line.modifiers or kinds[0] != kinds[3] or kinds[1] != kinds[2]:
            raise Refused(line.text)
        halves, sums = f"{kinds[1]}x2", "f16x2" if kinds[0] == "f16" else "f32"
        places = _C if sums == "f16x2" else _C.swapaxes(1, 2).reshape(4, WARP)
        types = (halves, halves, sums)
        a, b, c = (self.reads(*each) for each in zip(line.operands[1:], types, strict=True))
        writes = self.writes(line.operands[0], sums)

        def matrix(m: Machine, reads: list[Read], places: np.ndarray, n_columns: int) -> np.ndarray:
            shape = m.shape + places.shape[2:]
            held = [read(m) for read in reads]
            held = np.stack([x if x.shape == shape else np.broadcast_to(x, shape) for x in held])
            held = np.moveaxis(held.reshape(len(reads), -1, *places.shape[1:]), 1, 0)
            result = np.empty((len(held), places.size))
            result[:, places.ravel()] = held.reshape(len(held), -1)
            return result.reshape(len(held), -1, n_columns)

        def run(m: Machine) -> None:
            product = matrix(m, a, _A, 16) @ matrix(m, b, _B, 8) + matrix(m, c, places, 8)
            held = np.moveaxis(product.reshape(len(product), -1)[:, places], 1, 0)
            _write_all(m, writes, held.reshape(len(writes), *m.shape, *places.shape[2:]))

        return run

    # Memory

    def _is_shared(self) -> bool:
        spaces = {modifier.split("::")[0] for modifier in self.line.modifiers}
        if not spaces & {"shared", "global"} or "volatile" in spaces:
            raise Refused(self.line.text)
        return "shared" in spaces

    def _ld(self) -> Step:
        writes, place = self.writes(self.line.operands[0], self.type), self.line.operands[1]
        if "param" in self.line.modifiers:
            read = self.read("%param." + place.strip("[] "), self.type)
            return lambda m: writes[0](m, read(m))
        address, shared, bits = self.address(place), self._is_shared(), unsigned(self.type)
        size = WIDTHS[self.type] // 8 * len(writes)

        def run(m: Machine) -> None:
            stamps, at = m.lanes(address(m) + (m.own * m.stride if shared else 0))
            data = np.zeros((len(writes), *m.shape), bits)
            read = (m.shared if shared else m.memory).read(at, size, stamps)
            data[:, m.running()] = read.view(bits).T
            _write_all(m, writes, decode(data, self.type))

        return run

    def _st(self) -> Step:
        reads = self.reads(self.line.operands[1], f"b{WIDTHS[self.type]}")
        address, shared = self.address(self.line.operands[0]), self._is_shared()

        def run(m: Machine) -> None:
            at = address(m) + (m.own * m.stride if shared else 0)
            stamps, at, *values = m.lanes(at, *[read(m) for read in reads])
            (m.shared if shared else m.memory).write(at, np.stack(values, 1).view(np.uint8), stamps)

        return run

    def _cp(self) -> Step:
        _, action, *_ = modifiers = self.line.modifiers
        if action == "commit_group":
            return lambda m: np.add(m.n_groups, m.running(), out=m.n_groups)
        if action == "wait_group":
            n_pending = int(self.line.operands[0])
            return lambda m: m.wait_group(n_pending)
        if action not in ("ca", "cg") or "shared" not in modifiers:
            raise Refused(self.line.text)
        to, source = (self.address(operand) for operand in self.line.operands[:2])
        size = int(self.line.operands[2], 0)
        n = self.read(self.line.operands[-1], "u32")
        return lambda m: m.copy(to(m), source(m), size, n(m))


def _guarded(run: Step, line: Instruction) -> Step:
    """Run for the lanes whose guard holds; name the instruction in a fault."""

    def step(m: Machine) -> None:
        before = m.mask
        if line.guard and not (holds := _condition(m, line.guard)).all():
            m.mask = holds if before is None else before & holds
            if not m.mask.any():
                m.mask = before
                return
        try:
            run(m)
        except Fault as fault:
            raise Fault(f"{fault}: {line.text}") from None
        finally:
            m.mask = before

    return step


def _condition(m: Machine, guard: str) -> np.ndarray:
    holds = m.registers[guard.lstrip("@!")]
    return ~holds if "!" in guard else holds


def _write_all(m: Machine, writes: list[Write], parts: Iterable[np.ndarray]) -> None:
    for write, part in zip(writes, parts, strict=True):
        write(m, part)


def _registers(operand: str) -> list[str]:
    """Return the registers of `{%r1, %r2}`, or of one register alone."""
    return operand.strip("{} ").replace(",", " ").split()


def _rows(m: Machine, address: Read, n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return which warps run, and addresses and stamps of the 8 n rows of each of these, flat."""
    running = m.running().reshape(-1, WARP)
    if (running != running[:, :1]).any():
        raise Fault("half a warp moves a matrix")
    running, parts = running[:, 0], (address(m) + m.own * m.stride, m.stamps)
    return running, *(m.full(part).reshape(-1, WARP)[running, : 8 * n].ravel() for part in parts)
