"""Memory of interpreted kernels: who wrote and read each cell, and what may not be touched.

A cell is as wide as a kernel's narrowest access. Its last writer and reader are kept as stamps:
program, number of barriers that the program has passed, and warp. Threads of a warp are taken to
run together, so that only other warps can be too early or too late.

Shapes: L lanes that take part in an access, C cells of one lane's access.
"""

from __future__ import annotations

import numpy as np

WARPS = 255  # in place of a warp: several of them
PROGRAMS = (2**31 - 1) << 32  # a stamp of several programs


class Fault(Exception):
    """Error of a kernel that does what it must not do on a GPU."""


class Memory:
    """Spans of addresses [begin, end) in which lanes of many programs read and write."""

    def __init__(self, name: str, spans: list[tuple[int, int]], unit: int) -> None:
        self.name, self.unit = name, unit
        self.begins, self.ends = np.array(spans, np.int64).T
        self.bases = self.begins & -16
        sizes = (self.ends - self.bases + 15) & -16
        self.offsets = np.cumsum(sizes) - sizes  # of bases, in bytes
        n_cells = int(sizes.sum()) // unit
        self.data = np.zeros(n_cells, f"u{unit}")
        self.initialised = np.zeros(n_cells, bool)
        self.under_way = np.zeros(n_cells, bool)  # destinations of asynchronous copies
        self.writers, self.readers = np.zeros((2, n_cells), np.int64)
        self.reads: list[tuple[np.ndarray, np.ndarray]] = []  # not yet among `readers`

    def span(self, i: int) -> slice:
        """Return the bytes of span i among those of all cells."""
        begin = self.offsets[i] + self.begins[i] - self.bases[i]
        return slice(begin, begin + self.ends[i] - self.begins[i])

    def cells(self, addresses: np.ndarray, size: int) -> np.ndarray:
        """Return the cells [L, C] of `size` bytes at each of `addresses` [L]."""
        if (addresses & (size - 1)).any():
            raise Fault(f"accesses {size} bytes of {self.name} at an address that is not aligned")
        at = np.searchsorted(self.begins, addresses, "right") - 1
        if (at < 0).any() or (addresses + size > self.ends[at]).any():
            raise Fault(f"accesses {self.name} out of bounds")
        places = addresses - self.bases[at] + self.offsets[at]
        return places[:, None] // self.unit + np.arange(size // self.unit)

    def read(self, addresses: np.ndarray, size: int, stamps: np.ndarray) -> np.ndarray:
        """Return bytes [L, size] for lanes with `stamps` [L]."""
        cells, stamps = self.cells(addresses, size), stamps[:, None]
        self._check_copies(cells, "reads")
        if not self.initialised[cells].all():
            raise Fault(f"reads uninitialised {self.name}")
        self._check(self.writers[cells], stamps, "reads", "wrote")
        self.reads.append((cells, stamps))
        return self.data[cells].view(np.uint8)

    def write(self, addresses: np.ndarray, data: np.ndarray, stamps: np.ndarray) -> None:
        """Store bytes [L, size]."""
        cells, values = self.cells(addresses, data.shape[1]), data.view(self.data.dtype)
        # Threads of a program that hold the same value may all store it.
        self._claim(cells, stamps, self.data[cells] == values)
        self.land(cells, values, stamps)
        if not np.array_equal(self.data[cells], values):
            raise Fault(f"writes different values into one place of {self.name} at once")
        self._check(self.writers[cells], stamps[:, None], "writes", "writes", True)

    def begin_copy(self, addresses: np.ndarray, size: int, stamps: np.ndarray) -> np.ndarray:
        """Return the cells that a copy is to `land` in, which nobody may touch until then."""
        cells = self.cells(addresses, size)
        self._claim(cells, stamps, False)
        self.under_way[cells] = True
        return cells

    def land(self, cells: np.ndarray, values: np.ndarray, stamps: np.ndarray) -> None:
        self.data[cells] = values
        self.writers[cells] = stamps[:, None]
        self.initialised[cells] = True
        self.under_way[cells] = False

    def _claim(self, cells: np.ndarray, stamps: np.ndarray, equal: np.ndarray | bool) -> None:
        self._check_copies(cells, "writes")
        self._check(self.writers[cells], stamps[:, None], "writes", "wrote", equal)
        self._note_reads()
        self._check(self.readers[cells], stamps[:, None], "writes", "read")

    def _check_copies(self, cells: np.ndarray, does: str) -> None:
        if self.under_way[cells].any():
            raise Fault(f"{does} {self.name} while an asynchronous copy to it is under way")

    def _check(self, old: np.ndarray, new: np.ndarray, does: str, did: str, equal=False) -> None:
        differs = (old ^ new) * (old != 0)
        if (differs >> 32).any():
            raise Fault(f"{does} {self.name} that another program of the launch {did}")
        if ((differs != 0) & (differs >> 8 == 0) & np.logical_not(equal)).any():
            raise Fault(f"{does} {self.name} that another warp {did} since the last barrier")

    def _note_reads(self) -> None:
        for cells, stamps in self.reads:
            old = self.readers[cells]
            new = np.where(old == 0, stamps, _either(old, stamps))
            self.readers[cells] = new  # of lanes that read one cell, one is there
            np.maximum.at(self.readers, cells, _either(new, self.readers[cells]))
        self.reads.clear()


def _either(old: np.ndarray, new: np.ndarray) -> np.ndarray:
    """Return the stamp of both readers; the newer one suffices if a barrier lies between them."""
    differs = old ^ new
    several = np.where(differs >> 32 != 0, PROGRAMS, new | WARPS)
    return np.where((differs != 0) & ((differs >> 32 != 0) | (differs >> 8 == 0)), several, new)
