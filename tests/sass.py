"""Kernels compiled as their launchers launch them, and what their machine code says of them.

Needs Triton and the tools that it ships with, and no GPU.
"""

from __future__ import annotations

import re
import subprocess
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import triton
from triton.compiler import CompiledKernel

from fasteagle.quant.interleaved import InterleavedWeight
from ptx.card import Card

floats = partial(torch.empty, device="meta")
halves, brains = partial(floats, dtype=torch.float16), partial(floats, dtype=torch.bfloat16)
ints, longs = partial(floats, dtype=torch.int32), partial(floats, dtype=torch.int64)
flags = partial(floats, dtype=torch.bool)

ADDED = re.compile(r"\badd(?:\.\w+)*\.f32")
ATOMIC = re.compile(r"\b(atom|red)\.")
TWO_PROGRAMS = 49 * 1024  # of the 100 KB of shared memory, one of which each program loses


class Usage(NamedTuple):
    """Resources that one program takes. Stack and local memory above 0: registers spill."""

    registers: int  # of a thread
    shared: int  # bytes
    stack: int
    local: int

    def __str__(self) -> str:
        return (
            f"{self.registers} registers, {self.shared} B shared, "
            f"stack {self.stack}, local {self.local}"
        )


class Compiler(Card):
    """A card that keeps the kernels which it is to run, as Triton has compiled them for it."""

    def __init__(self, capability: int) -> None:
        super().__init__(capability)
        self.kernels: list[CompiledKernel] = []

    def launch(self, kernel: CompiledKernel, *grid) -> None:
        self.kernels.append(kernel)


def compiled(launch: Callable[[], object], capability: int = 86) -> list[CompiledKernel]:
    """The kernels that a function launches, over tensors like `floats`, which have no memory."""
    card = Compiler(capability)
    with pytest.MonkeyPatch.context() as patch:
        card.install(patch)
        launch()
    return card.kernels


def empty_weight(N: int, K: int, bits: int, group: int, offsets: bool) -> InterleavedWeight:
    words = floats(K, N, dtype=torch.int16)
    return InterleavedWeight(words, ints(K, N), N, K, bits, group, offsets)


def disassemble(compiled, folder: Path) -> tuple[str, Usage]:
    """SASS of a compiled kernel and what it takes."""
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    usage = run_tool("cuobjdump", "-res-usage", str(cubin))
    registers, stack, local = (
        int(re.search(rf"\b{key}:(\d+)", usage)[1]) for key in ("REG", "STACK", "LOCAL")
    )
    sass = run_tool("nvdisasm", "-c", str(cubin))
    return sass, Usage(registers, compiled.metadata.shared, stack, local)


def run_tool(name: str, *arguments: str) -> str:
    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    if not path.exists():
        pytest.skip(f"this Triton ships without {name}")
    return subprocess.run([path, *arguments], capture_output=True, text=True, check=True).stdout


def main_loop(sass: str) -> list[str]:
    """Instructions of the shortest backward jump round a tensor core product."""
    labels: dict[str, int] = {}
    instructions: list[str] = []
    loops = []
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_x_\d+):", line):
            labels[label[1]] = len(instructions)
        elif code := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*?);", line):
            instructions.append(code[1].strip())
            jump = re.search(r"\bBRA\b.*?(\.L_x_\d+)", code[1])
            if jump and jump[1] in labels:
                loops.append(instructions[labels[jump[1]] :])
    loops = [loop for loop in loops if any("HMMA" in code for code in loop)]
    assert loops, "no loop with a tensor core product"
    return min(loops, key=len)


def opcodes(loop: list[str]) -> Counter[str]:
    """Count each instruction, without its modifiers and predicates."""
    return Counter(re.sub(r"^@!?U?P\w+\s+", "", code).split()[0].split(".")[0] for code in loop)
