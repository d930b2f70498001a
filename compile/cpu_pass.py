"""Run a whole target pass by one call of our CPU kernels, and the end of a cycle by another.

The model's weights have just passed through the CPU's caches, so that Python code between two
operations is several times slower than in a loop without them. References: `cycle.verify` and
`cycle.accept_and_commit`, which also run everything that the kernels do not support.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from fasteagle.compile.cpu_blocks import MAX_ROWS, NativeBlocks
from fasteagle.decoding.cycle import EAGER
from fasteagle.decoding.launch import End
from fasteagle.decoding.together import groups, split
from fasteagle.model import Output, Target, Transformer
from fasteagle.quant.cpu_linear import NativeLinear, NativeNorm
from fasteagle.quant.cpu_tensors import Sampling, State, TargetTensors, Tree
from fasteagle.quant.linear import QuantizedLMHead
from fasteagle.sampling import SamplingMode
from fasteagle.state import CycleSpec, DecodeState
from fasteagle.tree import Proposal

DTYPES = (torch.float32, torch.bfloat16)  # of features and embeddings
PLAIN_GREEDY, GREEDY = SamplingMode(), Sampling()  # without a penalty


def why_not(target: Transformer) -> str | None:
    """Return why the kernels cannot run a whole target whose blocks fit; None if they can."""
    head, norm = target.lm_head, target.norm
    linear = head.linear if isinstance(head, QuantizedLMHead) else None
    if not isinstance(linear, NativeLinear) or linear.bias is not None:
        return "its LM head is not quantized in their layout"
    if norm.weight.dtype not in DTYPES or target.embedding.weight.dtype not in DTYPES:
        return "its features are neither fp32 nor bf16"
    return None


class NativePass:
    """Implementation of `Pieces.verify` by `Target` in `quant/cpu/target.h`."""

    def __init__(self, target: Transformer, blocks: NativeBlocks, norm: NativeNorm) -> None:
        head = target.lm_head
        assert isinstance(head, QuantizedLMHead) and isinstance(head.linear, NativeLinear)
        self._weight = norm.weight
        self._target = torch.classes.fasteagle_cpu.Target(
            blocks.tensors,
            TargetTensors(
                embedding=target.embedding.weight,
                cos=target.rope_cos,
                sin=target.rope_sin,
                norm=norm.scale,
                lm_head=head.linear.packed,
            ),
            target.config.n_head,
            target.config.sliding_window or 0,
            norm.eps,
        )

    def __call__(self, state: DecodeState, target: Target, proposal: Proposal) -> Output:
        if len(proposal.depths) > MAX_ROWS:
            return EAGER.verify(state, target, proposal)
        return self._run([state], [proposal])

    def _run(self, states: Sequence[DecodeState], proposals: Sequence[Proposal]) -> Output:
        """Return the output for the rows of all proposals, in order, at most `MAX_ROWS`."""
        aux_layers = states[0].aux_layers
        logits, features, aux_states = self._target.run_together(
            [proposal.tree.tokens for proposal in proposals],
            [state.seq_len for state in states],
            [proposal.paths for proposal in proposals],
            [proposal.depths for proposal in proposals],
            [state.cache.rows for state in states],
            aux_layers,
            self._weight,
        )
        return Output(logits, features, aux_states if aux_layers else None)

    def cycles(self, ends: Sequence[End], n: int, *how: Any) -> list[list[Any]]:
        """Return the results of `n` cycles of each text: `cycles` in `quant/cpu/ops.cpp`."""
        tokens, most = [end.tokens for end in ends], [end.most for end in ends]
        results: list[list[Any]] = self._target.cycles(*how, self._weight, tokens, most, n)
        return results

    def together(
        self, states: Sequence[DecodeState], target: Target, proposals: Sequence[Proposal]
    ) -> list[Output]:
        """Return the output of each proposal, `MAX_ROWS` rows of them in a pass."""
        outputs: list[Output] = []
        rows = [len(proposal.depths) for proposal in proposals]
        for begin, end in groups(rows, MAX_ROWS):
            if end == begin + 1:
                outputs.append(self(states[begin], target, proposals[begin]))
            else:
                output = self._run(states[begin:end], proposals[begin:end])
                outputs += split(output, rows[begin:end])
        return outputs


class NativeFinish:
    """Implementation of `Pieces.finish` by `quant/cpu/cycle.h`.

    A spec with its own acceptance rule is left to the core.
    """

    def __init__(self) -> None:
        # Tensors of states that never change: attributes cost time in each cycle. A cache may
        # change, and must not outlive its sequence here.
        self._fixed: WeakKeyDictionary[DecodeState, dict[str, Tensor]] = WeakKeyDictionary()

    def __call__(
        self, state: DecodeState, spec: CycleSpec, proposal: Proposal, output: Output
    ) -> None:
        tree = proposal.tree
        if spec.accept is not None or output.logits.dtype != torch.float32:
            EAGER.finish(state, spec, proposal, output)
            return
        torch.ops.fasteagle_cpu.finish_cycle(
            output.logits,
            output.features if output.aux_states is None else output.aux_states,
            Tree(tree.tokens, tree.parents, tree.valid, tree.sources),
            self.tensors(state),
            self.sampling(state, spec.kind),
            spec.depth,
            spec.in_place,
            proposal.extended,
            bool(spec.width),
        )

    def tensors(self, state: DecodeState) -> State:
        """Return the tensors of a state."""
        fixed = self._fixed.get(state)
        if fixed is None:
            names = ("seq_len", "root", "count", "tokens", "text", "result")
            self._fixed[state] = fixed = {name: getattr(state, name) for name in names}
        return State(**fixed, features=state.features, rows=state.cache.rows)

    def sampling(self, state: DecodeState, kind: SamplingMode) -> Sampling:
        """Return the tensors that a sampling mode reads."""
        if kind == PLAIN_GREEDY:
            return GREEDY
        tensors = state.sampling
        return Sampling(
            temperature=None if kind.greedy else tensors.temperature,
            seed=None if kind.greedy else tensors.seed,
            top_k=tensors.top_k if kind.top_k else None,
            top_p=tensors.top_p if kind.top_p else None,
            min_p=tensors.min_p if kind.min_p else None,
            penalty=tensors.penalty if kind.penalty else None,
            seen=state.seen if kind.penalty else None,
        )
