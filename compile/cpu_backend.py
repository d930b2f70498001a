"""Backend of quantized models on a CPU: passes, chains and commits as calls of our C++ kernels.

The weights are packed once, from the modules of a loaded model and of its draft heads.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from fasteagle.compile import cpu_cycles, cpu_pass
from fasteagle.compile.cpu_blocks import MAX_ROWS, NativeBlocks, fits
from fasteagle.compile.cpu_cycles import CpuRunner
from fasteagle.compile.cpu_draft import NativeDraft, Text
from fasteagle.compile.int8_cache import core_target
from fasteagle.decoding.backend import Advice, Backend
from fasteagle.decoding.cycle import EAGER, Pieces
from fasteagle.decoding.launch import Capture, Launch
from fasteagle.decoding.runner import Runner
from fasteagle.drafting.base import Drafter
from fasteagle.drafting.draft_head import under_mask
from fasteagle.model import EagleHead, Ops, Output, Transformer
from fasteagle.quant.cpu_linear import NativeNorm, in_huge_pages
from fasteagle.state import CycleSpec, DecodeState
from fasteagle.tree import Proposal


class CpuBackend(Backend):
    """Backend of a target whose blocks all fit the C++ kernels; see `cpu_blocks.fits`."""

    name = "cpu"
    parts = frozenset(("products", "passes", "commits", "drafting"))

    def __init__(self, model: Transformer, kv: str = "auto", advice: Advice | None = None) -> None:
        in_huge_pages(model.modules())
        blocks, norm = NativeBlocks(list(model.blocks)), NativeNorm(model.norm)

        def final_norm(module: nn.Module, x: Tensor) -> Tensor:
            return norm(x)

        ops = Ops(norm=final_norm, run_blocks=blocks.run, views=True)
        target = dataclasses.replace(core_target(model, kv), ops=ops, rows_at_once=MAX_ROWS)
        super().__init__(target, advice)
        self._why_not = cpu_pass.why_not(model)
        whole = self._why_not is None
        verify = cpu_pass.NativePass(model, blocks, norm) if whole else EAGER.verify
        self._drafts = NativeDraft()
        self._pieces = Pieces(self._drafts, verify, cpu_pass.NativeFinish())

    @property
    def pieces(self) -> Pieces:
        return self._pieces

    def runner(self, state: DecodeState) -> Runner:
        return CpuRunner(self, state)

    @property
    def leaves_blocks(self) -> bool:
        return False

    def run_queued(self, runners: Sequence[Runner]) -> int:
        ours = [runner for runner in runners if isinstance(runner, CpuRunner)]
        return cpu_cycles.run_queued(ours)

    def draft_together(
        self, runners: Sequence[Runner], launches: Sequence[Launch]
    ) -> list[Proposal]:
        ours = [i for i, (spec, drafter, _) in enumerate(launches) if self.drafts(drafter, spec)]
        begin = time.perf_counter()
        texts = [Text(runners[i].state, launches[i].drafter, launches[i].spec) for i in ours]
        drafted, seconds = self._drafts.together(texts)
        proposals = dict(zip(ours, drafted, strict=True))
        for i, own in zip(ours, seconds, strict=True):
            runners[i].drafted(begin, own)
        return [
            proposals[i] if i in proposals else runners[i].draft(launch)
            for i, launch in enumerate(launches)
        ]

    def verify_together(
        self,
        states: Sequence[DecodeState],
        proposals: Sequence[Proposal],
        capture: Capture | None = None,
    ) -> list[Output]:
        verify = self._pieces.verify
        if isinstance(verify, cpu_pass.NativePass):
            return verify.together(states, self.target, proposals)
        # A pass over the rows of all would compute some products by other kernels.
        pairs = zip(states, proposals, strict=True)
        return [verify(state, self.target, proposal) for state, proposal in pairs]

    def drafts(self, drafter: Drafter | None, spec: CycleSpec) -> bool:
        return self._pieces.draft is self._drafts and self._drafts.runs(drafter, spec)

    def leaves_head(self, head: EagleHead) -> bool:
        return not fits(head.block)

    def step(self, head: EagleHead) -> Callable[..., tuple[Tensor, Tensor]] | None:
        runs = fits(head.block) and not self.left & {"passes", "drafting"}
        return native_step(head) if runs else super().step(head)

    def leave(self, part: str) -> None:
        super().leave(part)
        if part in ("products", "passes"):
            self.left.add("passes")
            self.target = self.core
            self._pieces = EAGER._replace(finish=self._pieces.finish)
        elif part == "drafting":
            self._pieces = self._pieces._replace(draft=EAGER.draft)
        else:
            self._pieces = self._pieces._replace(finish=EAGER.finish)

    def describe(self) -> str:
        passes = "passes" if self._why_not is None else "decoder blocks"
        line = f"{super().describe()}: {passes}, chains and commits by C++ kernels"
        return line if self._why_not is None else f"{line}; LM head by torch: {self._why_not}"


def runs_on_cpu(model: Transformer, kv: str = "auto") -> bool:
    """Return whether the kernels can run this model's blocks; they read int8 rows in bf16."""
    reads = kv != "int8" or model.norm.weight.dtype == torch.bfloat16
    return reads and all(fits(block) for block in model.blocks)


def drafts_chains(backend: Backend) -> bool:
    """Return whether gated chains run: no kernel that drafts or verifies them failed."""
    return backend.name == "cpu" and not backend.left & {"passes", "drafting"}


def native_step(head: EagleHead) -> Callable[..., tuple[Tensor, Tensor]]:
    """Return a draft head's `forward` with its block run by the kernels."""
    block = under_mask(NativeBlocks([head.block]).run_alone)
    return functools.partial(head.forward, block=block)
