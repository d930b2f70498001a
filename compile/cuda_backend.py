"""Backend of a CUDA device: fused blocks, tree attention and small kernels, replayed as graphs.

The kernels' weights are built from the modules of a loaded model and of its draft heads. The core
runs dense blocks and blocks of odd sizes, with our attention; in a dtype without kernels, the
core's operations are replayed.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence

from torch import Tensor

from fasteagle.compile import cuda_ops, fixed_norm
from fasteagle.compile.cuda_blocks import MAX_ROWS, MOST_UNNORMED, FusedBlocks, fits, obstacle
from fasteagle.compile.cuda_draft import CudaDraft
from fasteagle.compile.cuda_graphs import CudaGraphs
from fasteagle.compile.cuda_pass import CudaPass
from fasteagle.compile.fixed_norm import expect_normed_inputs, keep_sums_finite
from fasteagle.compile.graphs import CapturedRunner
from fasteagle.compile.int8_cache import core_target
from fasteagle.compile.tree_attention import OPS, has_kernel
from fasteagle.config import ModelConfig
from fasteagle.decoding import cycle
from fasteagle.decoding.backend import Advice, Backend
from fasteagle.decoding.cycle import EAGER, Pieces
from fasteagle.decoding.launch import Capture, Launch
from fasteagle.decoding.runner import Runner
from fasteagle.drafting.base import Drafter, DraftOps
from fasteagle.drafting.draft_head import under_mask
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.model import CORE, EagleHead, Ops, Output, Transformer
from fasteagle.quant.cuda_linear import InterleavedLinear
from fasteagle.quant.linear import QuantizedLMHead
from fasteagle.state import CycleSpec, DecodeState
from fasteagle.tree import Pool, Proposal, relations

# Rows of a prompt that passes of 64 compute sooner than one does, by the dtype of a group's sums.
# At 7B on an H200 a pass of 64 takes 5.2 ms, one of 128 to 512 rows 23 to 38, as the host needs
# that long. Where sums in fp16 are twice as fast, cuBLAS, with sums in fp32, is slower for any: on
# an RTX 3090 64 rows take 11 ms, 1,024 by one pass 255, weights dequantized (predicted).
FEW_ROWS = {"fp32": 256, "fp16": 1024}
# Experts take 64 rows at a time in any pass, launched one by one if it is larger: 1,024 rows of
# Qwen3-30B-A3B took 250 ms on an H200 in one pass, 256 rows 33 ms in passes of 64.
ALL_ROWS = 1 << 30


def draft(state: DecodeState, drafter: Drafter | None, spec: CycleSpec) -> Proposal:
    """Run `cycle.draft`, with tree masks and paths computed by our kernel."""
    return cycle.draft(state, drafter, spec, cuda_ops.relate)


def finish(state: DecodeState, spec: CycleSpec, proposal: Proposal, output: Output) -> None:
    """Run `cycle.accept_and_commit`, with tokens drawn and accepted rows moved by our kernels."""
    cycle.accept_and_commit(state, spec, proposal, output, cuda_ops.move_rows, cuda_ops.draw)


class CudaBackend(Backend):
    """Backend that runs a target by Triton kernels where they fit, and replays cycles as graphs."""

    name = "cuda"

    def __init__(
        self,
        model: Transformer,
        kv: str = "auto",
        advice: Advice | None = None,
        replays: bool = True,
    ) -> None:
        weight, target = model.norm.weight, core_target(model, kv)
        self._has_experts = model.config.moe is not None
        self._may_replay = replays and weight.is_cuda
        self._attends = self._has_kernel(model.config, weight)
        obstacles = (obstacle(block) for block in model.blocks)
        self._obstacle = next((reason for reason in obstacles if reason is not None), None)
        self._fuses = self._attends and self._obstacle is None
        ops = target.ops
        if self._attends:
            keep_sums_finite(model.blocks, "model")
            if not self._fuses:
                expect_normed_inputs(model.blocks)
            ops = self._kernel_ops(model, OPS._replace(write=ops.write))
        super().__init__(dataclasses.replace(target, ops=ops), advice)
        self._pass = CudaPass(self.target) if self._fuses and _has_fixed_head(model) else None
        self._draft: CudaDraft | None = None

    def _kernel_ops(self, model: Transformer, ops: Ops) -> Ops:
        """Return `ops` (with tree attention) plus our norms and fused blocks where they fit."""
        if self._fuses:
            fused = FusedBlocks(list(model.blocks))
            return ops._replace(norm=fixed_norm.apply_norm, run_blocks=fused.run)
        if any(isinstance(module, InterleavedLinear) for module in model.modules()):
            # Otherwise norms would be the only place where a row's bits depend on other rows.
            return ops._replace(norm=fixed_norm.apply_norm)
        return ops

    @property
    def parts(self) -> frozenset[str]:  # type: ignore[override]
        return frozenset(["commits"] + ["products", "passes", "drafting"] * self._attends)

    def leave(self, part: str) -> None:
        super().leave(part)
        if part in ("products", "passes"):
            self.left.add("passes")
            self.target, self._attends, self._fuses = self.core, False, False
            self._pass = None
        self._draft = None  # it would run the kernels that it has

    @property
    def merges_lookup(self) -> bool:  # type: ignore[override]
        return "commits" not in self.left

    @property
    def pieces(self) -> Pieces:
        if not self.merges_lookup:
            return EAGER
        return Pieces(draft, EAGER.verify, finish)

    @property
    def _replays(self) -> bool:
        # The core reads on the host which experts rows take, which no graph can.
        return self._may_replay and (self._fuses or not self._has_experts)

    @property
    def most_rows(self) -> int | None:  # type: ignore[override]
        return MAX_ROWS if self._fuses else None

    @property
    def few_rows(self) -> int:  # type: ignore[override]
        if not self._fuses:
            return 0
        if self._has_experts:
            return ALL_ROWS
        sums = self.target.model.blocks[0].attention.qkv.accumulate
        return FEW_ROWS[str(sums)]

    @property
    def leaves_blocks(self) -> bool:
        return not self._fuses

    def leaves_head(self, head: EagleHead) -> bool:
        return not (self._attends_head(head) and fits(head.block))

    def head_ops(self, head: EagleHead) -> Ops:
        return OPS if self._attends_head(head) else CORE

    def _attends_head(self, head: EagleHead) -> bool:
        kernels = self._has_kernel(head.config.block, head.block.mlp_norm.weight)
        return kernels and not self.left & {"passes", "drafting"}

    def _has_kernel(self, config: ModelConfig, weight: Tensor) -> bool:
        return has_kernel(config, weight.dtype, weight.device)

    def runner(self, state: DecodeState) -> Runner:
        if not self._replays:
            return super().runner(state)
        return CapturedRunner(self, state, CudaGraphs(state.root.device))

    @property
    def shares_passes(self) -> bool:
        return self._pass is not None

    def verify_together(
        self,
        states: Sequence[DecodeState],
        proposals: Sequence[Proposal],
        capture: Capture | None = None,
    ) -> list[Output]:
        if self._pass is None:  # one by one where fused blocks have the bits of a row alone
            if not self._fuses:
                return super().verify_together(states, proposals)
            pairs = zip(states, proposals, strict=True)
            return [self.pieces.verify(state, self.target, own) for state, own in pairs]
        outputs = self._pass(states, proposals, capture if self._replays else None)
        if not self._pass.runs.is_captured:
            self._pass = None  # replayed cycles that take turns are faster
        return outputs

    def adopt(self, drafter: Drafter) -> None:
        super().adopt(drafter)
        if not isinstance(drafter, EagleDrafter) or not self.drafts_together(drafter):
            self._draft = None
        elif self._draft is None or self._draft.head is not drafter.head:
            self._draft = CudaDraft(drafter.head)

    def drafts_together(self, drafter: Drafter) -> bool:
        if not isinstance(drafter, EagleDrafter) or not self.shares_passes:
            return False
        return self._attends_head(drafter.head) and fits(drafter.head.block)

    def draft_together(
        self, runners: Sequence[Runner], launches: Sequence[Launch]
    ) -> list[Proposal]:
        pools: dict[int, Pool] = {}
        draft = self._draft  # a thread that compiles may replace it meanwhile
        if draft is not None:
            states = [runner.state for runner in runners]
            capture = runners[0].capture_pass if self._replays else None
            pools = draft(states, launches, capture)
            if not draft.runs.is_captured:
                self._draft = None
        proposals = []
        for i, (runner, launch) in enumerate(zip(runners, launches, strict=True)):
            proposals.append(runner.draft(launch, pools.get(i)))
        return proposals

    def launch_shared(
        self, state: DecodeState, drafter: Drafter | None, specs: Sequence[CycleSpec]
    ) -> None:
        """Launch the kernels of passes and drafting that several sequences share."""
        if self._pass is not None:
            self._pass.launch_all(state)
        if self._draft is not None and isinstance(drafter, EagleDrafter):
            self._draft.launch_all(state, drafter, specs)

    def select(
        self, pool: Pool, state: DecodeState, drafter: Drafter | None, spec: CycleSpec
    ) -> Proposal:
        relate = cuda_ops.relate if self.merges_lookup else relations
        return cycle.select(pool, state, drafter, spec, relate)

    def draft_ops(self, drafter: Drafter) -> DraftOps:
        ops = super().draft_ops(drafter)
        if not self.merges_lookup:
            return ops
        return DraftOps(
            cuda_ops.top_children, cuda_ops.rerank, ops.head, cuda_ops.look_up, cuda_ops.fuse
        )

    def step(self, head: EagleHead) -> Callable[..., tuple[Tensor, Tensor]] | None:
        if not self._attends_head(head):
            return super().step(head)
        keep_sums_finite(head, "draft head")
        block = self._blocks.get(head) or functools.partial(head.block.forward, ops=OPS)
        if fits(head.block):
            block = FusedBlocks([head.block]).run_alone
            if head.config.eagle3 is None and isinstance(head.fc, InterleavedLinear):
                head.fc.expect_range(MOST_UNNORMED)  # it reads the block's residual stream
        return functools.partial(head.forward, block=under_mask(block, beyond=MAX_ROWS))

    def describe(self) -> str:
        if not self._attends:
            what = "blocks by torch: no kernel for this dtype or head dim"
        elif self._fuses:
            what = "fused blocks and tree attention by Triton kernels"
        else:
            blocks = "experts" if self._has_experts else "blocks"
            what = f"tree attention by Triton kernels, {blocks} by the core ({self._obstacle})"
        if self._replays:
            what += ", replayed" + "; several answers take turns" * (self._pass is None)
        return f"{super().describe()}: {what}"


def _has_fixed_head(model: Transformer) -> bool:
    """Return whether a row's logits do not depend on the number of rows."""
    head = model.lm_head
    return isinstance(head, QuantizedLMHead) and isinstance(head.linear, InterleavedLinear)
