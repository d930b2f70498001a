"""Draft a confidence-gated chain of the draft head by one call of our CPU kernels.

The reference is `EagleDrafter.propose`, which drafts all levels and drops tokens below the
threshold.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fasteagle.compile.cpu_blocks import block_tensors, fits
from fasteagle.decoding.cycle import EAGER, Proposal
from fasteagle.drafting.base import Drafter
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.drafting.fused import FusedDrafter
from fasteagle.drafting.ngram import NgramDrafter
from fasteagle.drafting.thresholds import LONGEST, Thresholds
from fasteagle.model import Eagle3Head, EagleHead
from fasteagle.quant.cpu_linear import BLOCK, NativeLinear
from fasteagle.quant.cpu_tensors import CorpusIndex, HeadTensors
from fasteagle.quant.linear import QuantizedLMHead
from fasteagle.shapes import GatedChain
from fasteagle.state import CycleSpec, DecodeState
from fasteagle.tree import HEAD, LOOKUP, chain

LOOKING_UP = (FusedDrafter, NgramDrafter)


def can_draft(head: EagleHead) -> bool:
    """Return whether the kernels can draft with this draft head."""
    linears = [_linear(head.lm_head)]
    if not isinstance(head, Eagle3Head):
        linears.append(head.fc)
    return (
        fits(head.block)
        and all(isinstance(linear, NativeLinear) for linear in linears)
        and head.config.block.dim % BLOCK == 0
    )


def _linear(lm_head: nn.Module) -> nn.Module:
    """Return the linear of an LM head, which a `QuantizedLMHead` wraps."""
    return lm_head.linear if isinstance(lm_head, QuantizedLMHead) else lm_head


class NativeDraft:
    """Implementation of `Pieces.draft`: chains by the kernels, other shapes by the drafter.

    Proposals hold only the rows to verify.
    """

    def __init__(self) -> None:
        self._heads: dict[EagleHead, NativeChain | None] = {}
        self._chains: dict[tuple[int, int], Proposal] = {}  # by rows and source

    def runs(self, drafter: Drafter | None, spec: CycleSpec) -> bool:
        """Return whether the kernels draft this variant of the cycle."""
        if not isinstance(spec.shape, GatedChain):
            return False
        if isinstance(drafter, EagleDrafter):
            return self.of(drafter.head) is not None
        return isinstance(drafter, NgramDrafter)

    def __call__(self, state: DecodeState, drafter: Drafter | None, spec: CycleSpec) -> Proposal:
        if not isinstance(spec.shape, GatedChain):
            return EAGER.draft(state, drafter, spec)
        if isinstance(drafter, LOOKING_UP):
            copied = look_up(state, drafter, spec.depth)
            if copied is not None:
                return self.proposal(state, copied, LOOKUP)
        if not isinstance(drafter, EagleDrafter) or (native := self.of(drafter.head)) is None:
            return EAGER.draft(state, drafter, spec)
        noisy = not spec.kind.greedy and drafter.noise == "shared"
        depth = min(spec.depth, LONGEST)
        bounds = drafter.thresholds
        tokens, paths = native.draft(state, drafter, spec.width, depth, bounds, noisy)
        promised = tuple(paths.tolist()[: len(tokens)])
        return self.proposal(state, tokens, HEAD)._replace(promised=promised)

    def of(self, head: EagleHead) -> NativeChain | None:
        """Return the native chain of a draft head, made once; None if the kernels cannot draft."""
        if head not in self._heads:
            self._heads[head] = NativeChain(head) if can_draft(head) else None
        return self._heads[head]

    def proposal(self, state: DecodeState, tokens: Tensor, source: int) -> Proposal:
        """Return the proposal of a chain: the root, then `tokens`."""
        rows = 1 + len(tokens)
        if (rows, source) not in self._chains:  # its tree mask is always the same
            any_tokens = torch.zeros(rows, dtype=torch.long)
            tree = chain(any_tokens, torch.ones_like(any_tokens).bool())
            sources = torch.full_like(any_tokens, source)
            sources[0] = 0
            self._chains[rows, source] = Proposal.of(
                tree._replace(sources=sources), extended=source == HEAD
            )
        proposal = self._chains[rows, source]
        tokens = torch.cat((state.root, tokens)) if rows > 1 else state.root
        return proposal._replace(tree=proposal.tree._replace(tokens=tokens))


def look_up(state: DecodeState, drafter: FusedDrafter | NgramDrafter, reach: int) -> Tensor | None:
    """Return a chain of at most `reach` looked-up tokens whose expected gain pays for their rows.

    Returns None if the draft head promises more.
    """
    lookup = drafter.lookup
    tokens, _, gain = torch.ops.fasteagle_cpu.look_up(
        state.text,
        state.seq_len,
        lookup.table,
        lookup.last,
        [] if lookup.corpus is None else CorpusIndex(*lookup.corpus.index),
        lookup.longest,
        reach,
        drafter.lookup_threshold,
    )
    needed = drafter.head_gain
    copied: Tensor = tokens
    return copied if needed is None or gain > needed else None


class NativeChain:
    """Weights of one draft head as the kernels read them; see `quant/cpu/chain.h`."""

    def __init__(self, head: EagleHead) -> None:
        lm_head = _linear(head.lm_head)
        assert isinstance(lm_head, NativeLinear) and lm_head.bias is None, "see can_draft"
        tensors = HeadTensors(
            embedding=head.embedding.weight,
            cos=head.rope_cos,
            sin=head.rope_sin,
            lm_head=lm_head.packed,
        )
        flags = (False, False)
        if isinstance(head, Eagle3Head):
            assert head.config.eagle3 is not None, "an EAGLE-3 head"
            tensors = tensors._replace(
                embedding_norm=head.embedding_norm.weight.detach().float(),
                feature_norm=head.feature_norm.weight.detach().float(),
                norm=head.norm.weight.detach().float(),
            )
            own = head.config.eagle3
            flags = (own.norm_before_residual, own.norm_output)
        else:
            assert isinstance(head.fc, NativeLinear), "see can_draft"
            tensors = tensors._replace(fc=head.fc.packed, fc_bias=head.fc.bias)
        self._head = torch.classes.fasteagle_cpu.Head(
            block_tensors(head.block),
            tensors,
            head.block.attention.n_head,
            head.block.mlp_norm.eps,
            *flags,
            head.config.block.sliding_window or 0,
        )

    def draft(
        self,
        state: DecodeState,
        drafter: EagleDrafter,
        width: int,
        depth: int,
        thresholds: Thresholds,
        noisy: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Draft at most `depth` tokens after the root, from at most `width` pending pairs.

        Returns the tokens, and their path probabilities, then that of the first token left out, if
        there is one.
        """
        new = state.committed(min(width, int(state.count)))
        sampling = state.sampling
        tokens, paths = self._head.draft(
            new.tokens,
            drafter.head.read(new.features),
            new.count,
            state.seq_len,
            drafter.target_ids,
            drafter.cache.layers[0],
            *((sampling.temperature, sampling.seed) if noisy else (None, None)),
            depth,
            *thresholds,
        )
        return tokens, paths
