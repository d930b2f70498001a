"""Programs of a launch, interpreted side by side: registers, control flow, barriers, copies.

A register is an array that broadcasts to [P, N], so that what all threads or all programs share is
computed once. Lanes at the lowest instruction run first, until they meet others, as on a GPU.

Shapes: P programs, N threads of a program, L lanes that take part in an access.
"""

from __future__ import annotations

import numpy as np

from ptx.memory import Fault, Memory
from ptx.program import Program

WARP = 32


class Registers(dict[str, np.ndarray]):
    """Unsigned bits by name. Before the first write all are set: NaN, where they are a number.

    Compilers fill unused halves of words with such registers.
    """

    def __init__(self, program: Program) -> None:
        super().__init__()
        self._width = program.width

    def __missing__(self, name: str) -> np.ndarray:
        width = self._width(name)
        return np.full((1, 1), -1, np.int64).astype(f"u{width // 8}" if width > 1 else bool)


class Machine:
    """State of all programs of a launch."""

    def __init__(
        self, program: Program, grid: tuple[int, int, int], memory: Memory, shared_bytes: int
    ) -> None:
        P, N = grid[0] * grid[1] * grid[2], program.n_threads
        self.shape, self.memory = (P, N), memory
        self.registers = Registers(program)
        self.mask: np.ndarray | None = None  # lanes that run, broadcasts to [P, N]; None: all
        self.threads = np.arange(N)[None]
        places = np.unravel_index(np.arange(P), grid, order="F")
        self.special = {"%tid.x": self.threads}
        for axis, place, size in zip("xyz", places, grid, strict=True):
            self.special[f"%ctaid.{axis}"] = place[:, None]
            self.special[f"%nctaid.{axis}"] = np.full((1, 1), size)
        self.stride = (shared_bytes + 31) & -16  # a gap after each program
        spans = [(at, at + shared_bytes) for at in range(0, P * self.stride, self.stride)]
        self.shared = Memory("shared memory", spans, program.narrowest("shared"))
        self.own = np.arange(P)[:, None]
        self.stamps = (self.own + 1 << 32) + self.threads // WARP  # see `memory`
        self.n_groups = np.zeros(self.shape, np.int64)  # committed groups of copies
        self.copies: list[tuple[np.ndarray, ...]] = []  # lanes, groups, cells, values

    def write(self, register: str, value: np.ndarray) -> None:
        """Assign to the lanes that run; `value` has the unsigned dtype of the register."""
        if self.mask is not None:
            value = np.where(self.mask, value, self.registers[register])
        self.registers[register] = value

    def full(self, value: np.ndarray) -> np.ndarray:
        return value if value.shape == self.shape else np.broadcast_to(value, self.shape)

    def running(self) -> np.ndarray:
        """Return the lanes [P, N] that run."""
        return self.full(np.bool_(True) if self.mask is None else self.mask)

    def run(self, code: list) -> None:
        """Interpret from the first instruction to the end of all lanes.

        An instruction returns None, or a list of where lanes go on: (index, mask). None in its
        place is a barrier.
        """
        fronts = {0: np.ones(self.shape, bool)}
        waiting: dict[int, np.ndarray] = {}
        while fronts:
            at = min(fronts)
            mask = fronts.pop(at)
            meeting = min(fronts, default=len(code))
            self.mask = None if mask.all() else mask
            lanes = None
            while lanes is None and at != meeting:
                step = code[at]
                lanes = self._arrive(at, mask, fronts, waiting) if step is None else step(self)
                at += 1
            for place, some in lanes or [(at, mask)]:
                if some.any():
                    fronts[place] = fronts[place] | some if place in fronts else some
        if waiting:
            raise Fault("waits at a barrier that others of its program never reach")

    def _arrive(self, at: int, mask: np.ndarray, fronts: dict, waiting: dict) -> list:
        """Let lanes wait; return those of programs whose lanes have all arrived."""
        here = waiting.pop(at, False) | mask
        complete = here.copy()
        for others in (*fronts.values(), *waiting.values()):
            complete &= ~others.any(1, keepdims=True)
        if (here != complete).any():
            waiting[at] = here & ~complete
        elif not fronts and not waiting:
            self.shared.reads.clear()  # all lie before a barrier of all
        self.stamps = self.stamps + (complete.any(1, keepdims=True) << 8)
        return [(at + 1, complete)]

    def lanes(self, *values: np.ndarray) -> list[np.ndarray]:
        """Return stamps [L] and `values` [L] of the lanes that run."""
        mask = self.running()
        return [self.full(value)[mask] for value in (self.stamps, *values)]

    def copy(self, to: np.ndarray, source: np.ndarray, size: int, n: np.ndarray) -> None:
        """Begin to copy `n` (`size` or 0) bytes of global to shared memory; the rest becomes 0."""
        stamps, to, source, n = self.lanes(to + self.own * self.stride, source, n)
        data, reads = np.zeros((len(to), size), np.uint8), n != 0
        if reads.any():
            data[reads] = self.memory.read(source[reads], size, stamps[reads])
        cells = self.shared.begin_copy(to, size, stamps)
        lanes = np.nonzero(self.running().ravel())[0]
        groups = self.n_groups.ravel()[lanes]
        self.copies.append((lanes, groups, cells, data.view(self.shared.data.dtype)))

    def wait_group(self, n_pending: int) -> None:
        """Land the copies of running lanes but for the `n_pending` groups committed last."""
        stamps, n_groups = self.stamps.ravel(), self.n_groups.ravel()
        remaining = []
        for copy in self.copies:
            lanes, groups, cells, values = copy
            ready = self.running().ravel()[lanes] & (groups < n_groups[lanes] - n_pending)
            if ready.any():
                self.shared.land(cells[ready], values[ready], stamps[lanes[ready]])
            if not ready.all():
                remaining.append(tuple(part[~ready] for part in copy))
        self.copies = remaining
