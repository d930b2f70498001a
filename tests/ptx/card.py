"""A GPU that is not there: Triton compiles for it, and launches are interpreted on CPU tensors."""

from __future__ import annotations

import ctypes
import functools
from collections import Counter
from collections.abc import Callable, MutableMapping

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary
from triton.backends.compiler import GPUTarget
from triton.compiler import CompiledKernel
from triton.runtime.driver import driver

from ptx.instructions import compiled
from ptx.machine import Machine
from ptx.memory import Fault, Memory
from ptx.program import Program


class Card:
    """Triton's driver of a card of this capability; counts the launches of each kernel.

    `edit` changes the PTX of every kernel before it runs, to plant faults.
    """

    def __init__(self, capability: int = 86) -> None:
        self.capability = capability
        self.device = 1000 + capability  # Triton keeps what it compiled by device
        self.launches: Counter[str] = Counter()
        self.edit: Callable[[str], str] = lambda ptx: ptx
        # Tensors that kernels may reach by addresses in memory, beside those they are given.
        self.reachable: list[torch.Tensor] = []
        # What `torch.empty` made: its version then, and which bytes kernels have written.
        self.fresh: MutableMapping[torch.Tensor, tuple[int, np.ndarray]] = WeakTensorKeyDictionary()

    def install(self, monkeypatch) -> None:
        """Let all launches of Triton kernels come here."""
        launch = lambda kernel: functools.partial(self.launch, kernel)  # noqa: E731
        monkeypatch.setattr(driver, "_active", self)
        monkeypatch.setattr(CompiledKernel, "run", property(launch))
        monkeypatch.setattr(CompiledKernel, "_init_handles", lambda kernel: None)
        for owner, name in ((torch, "empty"), (torch.Tensor, "new_empty")):
            monkeypatch.setattr(owner, name, self._noting(getattr(owner, name)))

    def get_current_device(self) -> int:
        return self.device

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def launch(self, kernel: CompiledKernel, x: int, y: int, z: int, *rest) -> None:
        """Run a grid of programs to their end."""
        args = rest[6:]  # after what a driver needs: stream, function, hooks
        types = kernel.src.signature.values()
        args = [arg for arg, type in zip(args, types, strict=True) if type != "constexpr"]
        program, code = _read(self.edit(kernel.asm["ptx"]))
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor) and arg.numel()]
        spans = _spans(tensors + self.reachable)
        memory = Memory("global memory", spans, program.narrowest("global"))
        self._exchange(memory, False)
        machine = Machine(program, (x, y, z), memory, kernel.metadata.shared)
        for name in program.parameters:  # those after the arguments are Triton's own
            value = _bits(args.pop(0)) if args else 0
            machine.special[f"%param.{name}"] = np.full((1, 1), value, np.uint64)
        try:
            with np.errstate(all="ignore"):
                machine.run(code)
        except Fault as fault:
            raise Fault(f"{program.name} {fault}") from None
        self._exchange(memory, True)
        self.launches[kernel.src.fn.__name__] += 1

    def _noting(self, make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def noted(*args, **options) -> torch.Tensor:
            made = make(*args, **options)
            if type(made) is torch.Tensor and made.device.type == "cpu" and made.numel():
                self.fresh[made] = made._version, np.zeros(made.nbytes, bool)
            return made

        return noted

    def _exchange(self, memory: Memory, back: bool) -> None:
        """Copy tensors to `memory`, or `back`; with them goes what has been initialised."""
        data, unit = memory.data.view(np.uint8), memory.unit
        for i, (begin, end) in enumerate(
            zip(memory.begins.tolist(), memory.ends.tolist(), strict=True)
        ):
            span, known = memory.span(i), np.ones(end - begin, bool)
            for tensor, (version, written) in self.fresh.items():
                at = begin - tensor.data_ptr()
                if at >= 0 and at + len(known) <= tensor.nbytes and tensor._version == version:
                    known = written[at : at + len(known)]
            tensor_bytes = np.ctypeslib.as_array((ctypes.c_uint8 * len(known)).from_address(begin))
            cells = memory.initialised[span.start // unit : -(-span.stop // unit)]
            if back:
                tensor_bytes[:] = data[span]
                known |= np.repeat(cells, unit)[: len(known)]
            else:
                data[span] = tensor_bytes
                cells[:] = np.append(known, [True] * (-len(known) % unit)).reshape(-1, unit).all(1)


@functools.lru_cache(maxsize=256)
def _read(ptx: str) -> tuple[Program, list]:
    program = Program(ptx)
    return program, compiled(program)


def _spans(tensors: list[torch.Tensor]) -> list[tuple[int, int]]:
    """Return begins and ends of the memory of tensors; those that overlap are one."""
    spans: list[tuple[int, int]] = []
    for begin, end in sorted(_span(tensor) for tensor in tensors):
        if spans and begin < spans[-1][1]:
            spans[-1] = spans[-1][0], max(end, spans[-1][1])
        else:
            spans.append((begin, end))
    return spans


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    last = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()


def _bits(argument: object) -> int:
    if isinstance(argument, torch.Tensor):
        return argument.data_ptr()
    if isinstance(argument, float):
        return int(np.float32(argument).view(np.uint32))
    return int(argument) & (2**64 - 1)
