"""PTX text as a list of instructions."""

from __future__ import annotations

import re
from typing import NamedTuple

WIDTHS = {"pred": 1, "f16x2": 32, "bf16x2": 32, "bf16": 16} | {
    f"{kind}{bits}": bits for kind in "busf" for bits in (8, 16, 32, 64)
}


class Instruction(NamedTuple):
    """One line: `@guard opcode.modifiers operands`."""

    text: str
    guard: str  # a predicate register after "@" or "@!", or empty
    opcode: str
    modifiers: list[str]  # the last one is the type, if there are any
    operands: list[str]


class Program:
    """A kernel: its instructions, where labels lead, and the widths of its registers."""

    def __init__(self, ptx: str) -> None:
        ptx = re.sub(r"//[^\n]*|/\*.*?\*/", "", ptx, flags=re.S).split(".section")[0]
        head = re.search(r"\.entry\s+(\w+)\(([^)]*)\)(.*?)\{(.*)", ptx, re.S)
        assert head, "no kernel"
        self.name, parameters, options, body = head.groups()
        self.parameters = [part.split()[-1] for part in parameters.split(",")]
        self.n_threads = int(re.search(r"\.reqntid\s+(\d+)", options)[1])
        self.widths = {"_": 64}  # where what nobody needs goes
        self.labels: dict[str, int] = {}
        self.instructions: list[Instruction] = []
        for line in re.split(r"[;\n]", body):
            self._read(line.strip("{} \t"))

    def _read(self, line: str) -> None:
        while label := re.match(r"(\$?\w+):\s*\{?\s*", line):
            self.labels[label[1]] = len(self.instructions)
            line = line[label.end() :]
        if line.startswith(".reg"):
            _, kind, names = line.split(None, 2)
            for name in names.split(","):
                self.widths[name.strip().split("<")[0]] = WIDTHS[kind[1:]]
        elif line and not line.startswith("."):
            guard, name, rest = re.match(r"(@!?%\w+)?\s*(\S+)\s*(.*)", line).groups()
            opcode, *modifiers = name.split(".")
            operands = re.findall(r"\{[^}]*\}?|\[[^\]]*\]|[^,\s]+", rest)
            self.instructions.append(Instruction(line, guard or "", opcode, modifiers, operands))

    def width(self, register: str) -> int:
        """Return the bits of a register, one for a predicate."""
        return self.widths.get(register) or self.widths[register.rstrip("0123456789")]

    def narrowest(self, space: str) -> int:
        """Return the bytes of the smallest access to "global" or "shared", at most four."""
        accesses = [line for line in self.instructions if line.opcode in ("ld", "st")]
        spaces = [(each.split("::")[0], line) for line in accesses for each in line.modifiers]
        return min(
            [4, *(WIDTHS[line.modifiers[-1]] // 8 for each, line in spaces if each == space)]
        )
