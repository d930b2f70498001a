"""Draft confidence-gated chains of the draft head, of one text or several, by one kernel call.

The reference is `EagleDrafter.propose`, which drafts all levels and drops tokens below the
threshold.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from fasteagle.compile.cpu_blocks import MAX_ROWS, block_tensors, fits
from fasteagle.decoding.cycle import EAGER
from fasteagle.drafting.base import Drafter
from fasteagle.drafting.eagle import EagleDrafter
from fasteagle.drafting.lookup import LONGEST_MATCH
from fasteagle.drafting.ngram import NgramDrafter
from fasteagle.drafting.thresholds import LONGEST, Thresholds
from fasteagle.model import Eagle3Head, EagleHead
from fasteagle.quant.cpu_linear import NativeLinear
from fasteagle.quant.cpu_tensors import CorpusIndex, HeadTensors
from fasteagle.quant.linear import QuantizedLMHead
from fasteagle.shapes import GatedChain
from fasteagle.state import CycleSpec, DecodeState
from fasteagle.tree import HEAD, LOOKUP, Proposal, chain


def can_draft(head: EagleHead) -> bool:
    """Return whether the kernels can draft with this draft head."""
    linears = [_linear(head.lm_head)]
    if not isinstance(head, Eagle3Head):
        linears.append(head.fc)
    return fits(head.block) and all(isinstance(linear, NativeLinear) for linear in linears)


def _linear(lm_head: nn.Module) -> nn.Module:
    """Return the linear of an LM head, which a `QuantizedLMHead` wraps."""
    return lm_head.linear if isinstance(lm_head, QuantizedLMHead) else lm_head


class Text(NamedTuple):
    """Text to draft for, and the variant of its cycle."""

    state: DecodeState
    drafter: Drafter | None
    spec: CycleSpec

    @property
    def eagle(self) -> EagleDrafter:
        """The drafter, which has a draft head."""
        assert isinstance(self.drafter, EagleDrafter), "see NativeDraft.runs"
        return self.drafter

    @property
    def rule(self) -> tuple[int, Thresholds]:
        """Greatest depth of the draft head's chain, and the bounds that end it before."""
        return min(self.spec.depth, LONGEST), self.eagle.thresholds

    @property
    def is_noisy(self) -> bool:
        """Return whether the draft head ranks tokens with the noise that the target draws with."""
        return not self.spec.kind.greedy and self.eagle.noise == "shared"


class NativeDraft:
    """Implementation of `Pieces.draft`: chains by the kernels, other shapes by the drafter.

    Proposals hold only the rows to verify.
    """

    def __init__(self) -> None:
        self._heads = WeakKeyDictionary[EagleHead, NativeChain | None]()
        self._chains: dict[tuple[int, int], Proposal] = {}  # by rows and source

    def runs(self, drafter: Drafter | None, spec: CycleSpec) -> bool:
        """Return whether the kernels draft this variant of the cycle."""
        if not isinstance(spec.shape, GatedChain):
            return False
        if isinstance(drafter, EagleDrafter):
            return self.of(drafter.head) is not None
        return isinstance(drafter, NgramDrafter)

    def __call__(self, state: DecodeState, drafter: Drafter | None, spec: CycleSpec) -> Proposal:
        if not self.runs(drafter, spec):
            return EAGER.draft(state, drafter, spec)
        [proposal], _ = self.together([Text(state, drafter, spec)])
        return proposal

    def together(self, texts: Sequence[Text]) -> tuple[list[Proposal], list[float]]:
        """Return the proposal of each text, and the seconds of each.

        All are chains that `runs` has allowed. Draft heads run once for all texts of one depth and
        stopping rule, up to `MAX_ROWS` of them, and their time is divided among these texts.
        """
        proposals: dict[int, Proposal] = {}
        seconds = [0.0] * len(texts)
        shared: dict[Any, list[int]] = defaultdict(list)
        for i, text in enumerate(texts):
            begin = time.perf_counter()
            copied = self._copied(*text)
            if copied is not None:
                proposals[i] = copied
            else:
                shared[text.eagle.head, text.rule].append(i)
            seconds[i] = time.perf_counter() - begin
        parts = [
            (head, rule, of_rule[at : at + MAX_ROWS])
            for (head, rule), of_rule in shared.items()
            for at in range(0, len(of_rule), MAX_ROWS)
        ]
        for head, rule, places in parts:
            begin = time.perf_counter()
            native = self.of(head)
            assert native is not None, "see runs"
            chains = native.draft([texts[i] for i in places], *rule)
            for i, (tokens, paths) in zip(places, chains, strict=True):
                proposal = self.proposal(texts[i].state, tokens, HEAD)
                promised = tuple(paths.tolist()[: len(tokens)])
                proposals[i] = proposal._replace(promised=promised)
            share = (time.perf_counter() - begin) / len(places)
            for i in places:
                seconds[i] += share
        return [proposals[i] for i in range(len(texts))], seconds

    def _copied(
        self, state: DecodeState, drafter: Drafter | None, spec: CycleSpec
    ) -> Proposal | None:
        """Return the proposal of a looked-up chain; None if the draft head promises more."""
        if drafter is None or drafter.lookup is None:
            return None
        copied = look_up(state, drafter, spec.depth)
        return None if copied is None else self.proposal(state, copied, LOOKUP)

    def reads(self, head: EagleHead) -> bool:
        """Return whether the kernels make the features that the draft head's block reads, too."""
        native = self.of(head)
        return native is not None and native.reads

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
        tokens = torch.cat((state.root, tokens))
        return proposal._replace(tree=proposal.tree._replace(tokens=tokens))


def look_up(state: DecodeState, drafter: Drafter, reach: int) -> Tensor | None:
    """Return a chain of at most `reach` looked-up tokens whose expected gain pays for their rows.

    Returns None if the draft head promises more.
    """
    lookup = drafter.lookup
    assert lookup is not None, "it looks up"
    tokens, _, gain = torch.ops.fasteagle_cpu.look_up(
        state.text,
        state.seq_len,
        lookup.table,
        lookup.last,
        [] if lookup.corpus is None else CorpusIndex(*lookup.corpus.index),
        LONGEST_MATCH,
        reach,
        drafter.lookup_threshold,
    )
    needed = drafter.head_gain
    copied: Tensor = tokens
    return copied if needed is None or gain > needed else None


class NativeChain:
    """Weights of one draft head as the kernels read them; see `quant/cpu/head.h`.

    `reads`: whether they hold all that makes features of the target's states.
    """

    def __init__(self, head: EagleHead) -> None:
        lm_head = _linear(head.lm_head)
        assert isinstance(lm_head, NativeLinear) and lm_head.bias is None, "see can_draft"
        tensors = HeadTensors(
            embedding=head.embedding.weight,
            cos=head.rope_cos,
            sin=head.rope_sin,
            lm_head=lm_head.packed,
        )
        own = head.config.eagle3
        if own is not None or head.config.mtp:
            tensors = tensors._replace(
                embedding_norm=head.embedding_norm.weight.detach().float(),
                feature_norm=head.feature_norm.weight.detach().float(),
                norm=head.norm.weight.detach().float(),
            )
        flags = (False, head.config.mtp)
        self.reads = True
        if own is not None:
            flags = (own.norm_before_residual, own.norm_output)
            assert isinstance(head, Eagle3Head), "which has this config"
            self.reads = isinstance(head.fc, NativeLinear) and not head.aux_norms
            if isinstance(head.fc, NativeLinear) and self.reads:
                tensors = tensors._replace(reader=head.fc.packed, reader_bias=head.fc.bias)
        else:
            assert isinstance(head.fc, NativeLinear), "see can_draft"
            tensors = tensors._replace(fc=head.fc.packed, fc_bias=head.fc.bias)
        self.weights = torch.classes.fasteagle_cpu.Head(
            block_tensors(head.block),
            tensors,
            head.block.attention.n_head,
            head.block.mlp_norm.eps,
            *flags,
            head.config.block.sliding_window or 0,
        )

    def draft(
        self, texts: Sequence[Text], depth: int, thresholds: Thresholds
    ) -> list[tuple[Tensor, Tensor]]:
        """Draft at most `depth` tokens after the root of each text, from its pending pairs.

        Returns the tokens of each, and their path probabilities, then that of the first token left
        out, if there is one.
        """
        pairs, drafters = [], [text.eagle for text in texts]
        for state, _, spec in texts:
            pairs.append(state.committed(min(spec.width, int(state.count))))
        noisy = [text.state.sampling if text.is_noisy else None for text in texts]
        chains: list[tuple[Tensor, Tensor]] = self.weights.draft(
            [new.tokens for new in pairs],
            [drafter.head.read(new.features) for drafter, new in zip(drafters, pairs, strict=True)],
            [new.count for new in pairs],
            [text.state.seq_len for text in texts],
            drafters[0].target_ids,
            [drafter.cache.layers[0][0] for drafter in drafters],
            [drafter.cache.layers[0][1] for drafter in drafters],
            [sampling and sampling.temperature for sampling in noisy],
            [sampling and sampling.seed for sampling in noisy],
            depth,
            *thresholds,
        )
        return chains
