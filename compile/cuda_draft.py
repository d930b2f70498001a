"""Run draft heads on CUDA over the rows of several texts, once for every level of their trees.

The head's weights are then read once for all texts, whose passes are shared as well. The code is
that of a text alone, `HeadDrafter.extend` and `eagle.expand`, over a cache that is those of all
texts; `EagleDrafter.select` then makes each text's own tree of its candidates. Where all of the
head's linears are quantized, the candidates have the bits that a text alone gets.

Shapes: B texts, W pending pairs of each, F feature dim, k nodes of a level, P candidates.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from fasteagle.compile.cuda_blocks import MAX_ROWS
from fasteagle.compile.cuda_pass import SEQUENCES, at_least, cache_numbers, send, shared_caches
from fasteagle.compile.split_cycles import SharedRuns
from fasteagle.decoding.launch import Capture, Launch
from fasteagle.drafting.draft_head import Prediction
from fasteagle.drafting.eagle import EagleDrafter, expand
from fasteagle.model import EagleHead
from fasteagle.sampling import SamplingMode, SamplingTensors
from fasteagle.shapes import FusedShape, TreeShape
from fasteagle.state import Committed, CycleSpec, DecodeState
from fasteagle.tree import Pool

if TYPE_CHECKING:  # at run time only where Triton is: on CUDA
    from fasteagle.compile.kernels.sequence_kernels import Sequences


Texts = Sequence[tuple[DecodeState, EagleDrafter]]


class Variant(NamedTuple):
    """Constants of drafting; all else is a value on the device."""

    n_texts: int  # at most
    width: int  # pairs of a text that the draft head is run on
    levels: int
    topk: int
    kind: SamplingMode  # greedy, or any in which the target's noise ranks the candidates
    n_slots: int  # most slots of a draft cache

    @property
    def sizes(self) -> list[int]:
        """Numbers of texts whose rows the kernels can run at once."""
        return [n for n in SEQUENCES if n * max(self.width, self.topk) <= MAX_ROWS]


class SharedDraft:
    """Drafting of one variant, with what it reads of the texts."""

    def __init__(self, drafter: EagleDrafter, variant: Variant, features: Tensor) -> None:
        """Make the tensors for draft caches and pending `features` like the given ones."""
        from fasteagle.compile.kernels import sequence_kernels

        B, W, device = variant.n_texts, variant.width, features.device
        self._drafter = copy.copy(drafter)
        self._variant = variant
        self.seq_len = torch.zeros(B, dtype=torch.long, device=device)
        self.sampling = SamplingTensors(device)
        self.sampling.seed = torch.zeros_like(self.seq_len)
        self.sampling.temperature = torch.ones(B, device=device)
        self._tokens = self.seq_len.new_zeros(B, W)
        self._features = features.new_zeros(B, W, features.shape[1])
        self._count = torch.ones_like(self.seq_len)
        self._numbers: list[list[int]] = []
        self._table = self.seq_len.new_zeros(B, int(sequence_kernels.FIELDS))
        self._pairs, self._level = (
            _Rows(drafter, self._table, n, variant.n_slots) for n in (W, variant.topk)
        )

    def load(self, texts: Texts) -> None:
        """Let the next run draft for these texts, whose draft caches must live until its end."""
        n, W = len(texts), self._variant.width
        states = [state for state, _ in texts]
        numbers = [cache_numbers(drafter.cache.rows) for _, drafter in texts]
        if numbers != self._numbers:
            self._numbers = numbers
            none = [0] * (self._table.shape[1] - len(numbers[0]))  # fields of `gather` alone
            send([none + own for own in numbers], self._table)
            for rows in (self._pairs, self._level):
                rows.load(n)
        for into, parts in (
            (self.seq_len, [state.seq_len for state in states]),
            (self._count, [state.count[0] for state in states]),
            (self._tokens, [state.tokens[:W] for state in states]),
            (self._features, [state.features[:W] for state in states]),
            (self.sampling.seed, [state.sampling.seed for state in states]),
            (self.sampling.temperature, [state.sampling.temperature for state in states]),
        ):
            torch.stack(parts, out=into[:n])

    def compute(self) -> Pool:
        """Return candidates [B, P] of the loaded texts; those of missing texts are arbitrary."""
        variant = self._variant
        prediction = self._extended()
        return expand(self._drafter, prediction, self, variant.kind, variant.levels, variant.topk)

    def _extended(self) -> Prediction:
        """Run the pending pairs; the level's rows come next."""
        drafter, pairs = self._drafter, (self._tokens.flatten(), self._features.flatten(0, 1))
        drafter.cache = self._pairs.cache  # type: ignore[assignment]
        prediction = drafter.extend(Committed(*pairs, self._count), self.seq_len)
        drafter.cache = self._level.cache  # type: ignore[assignment]
        return prediction

    def launch_all(self) -> None:
        """Launch every kernel over no texts; indices are computed from no result."""
        drafter, variant = self._drafter, self._variant
        k, n_rows = variant.topk, variant.topk * variant.n_texts
        prediction = self._extended()
        tokens = self.seq_len.new_zeros(n_rows)
        features = prediction.feature.repeat_interleave(k, 0)
        paths = torch.zeros(n_rows, 1, dtype=torch.int32, device=tokens.device)
        level = drafter.step(tokens, features, self.seq_len, 0, paths, 0)
        for logits in (prediction.logits, level[0]):
            rest = self.seq_len, 1, variant.kind, self.sampling
            drafter.ops.top_children(drafter.ranking_logits(logits, *rest), k)


class _Rows:
    """Rows of several texts, equally many of each, in a run of the draft head, and their caches."""

    def __init__(self, drafter: EagleDrafter, table: Tensor, n_rows: int, n_slots: int) -> None:
        from fasteagle.compile.kernels import sequence_kernels, tree_kernels

        config = drafter.head.config.block
        B, self._n_rows = len(table), n_rows
        self._n_query_rows = n_rows * (config.n_head // config.n_kv_head)
        self._block = tree_kernels.row_block(self._n_query_rows)
        n_blocks = B * -(-self._n_query_rows // self._block)
        self._sequences: Sequences = sequence_kernels.empty(table, B * n_rows, 1, n_blocks)
        self.cache = shared_caches(drafter.cache.rows, n_slots, self._sequences, self._block)

    def load(self, n: int) -> None:
        """Let the first `n` texts have rows."""
        texts, T = range(n), self._n_rows
        firsts = range(0, self._n_query_rows, self._block)
        blocks = [[i, i * T, T, first] for i in texts for first in firsts]
        members = [[i] for i in texts for _ in range(T)]
        send(blocks, self._sequences.blocks, missing=-1)
        send(members, self._sequences.members.unsqueeze(1), missing=-1)


class CudaDraft:
    """Shared drafting by one draft head: a `SharedDraft` for each variant that was needed.

    The head's block must be one that the fused blocks run.
    """

    def __init__(self, head: EagleHead) -> None:
        self.head = head
        self.runs: SharedRuns[Variant, Texts, Pool] = SharedRuns(
            lambda variant, texts: SharedDraft(texts[0][1], variant, texts[0][0].features)
        )

    def __call__(
        self,
        states: Sequence[DecodeState],
        launches: Sequence[Launch],
        capture: Capture | None = None,
    ) -> dict[int, Pool]:
        """Return the draft head's candidates of cycles, by their number; others draft alone.

        Runs are replayed where `capture` is given and captures them. Candidates are in memory that
        the next call overwrites.
        """
        places: dict[Variant, list[int]] = defaultdict(list)
        for i, launch in enumerate(launches):
            if (variant := self._variant(launch)) is not None:
                places[variant].append(i)
        pools: dict[int, Pool] = {}
        for variant, all_of_it in places.items():
            n = max(variant.sizes, default=1)
            for at in range(0, len(all_of_it), n):
                own = all_of_it[at : at + n]
                if len(own) < 2:
                    continue
                sized = variant._replace(n_texts=at_least(len(own), SEQUENCES))
                texts = [(states[i], _eagle(launches[i])) for i in own]
                pool = self.runs(sized, texts, capture)
                if len(all_of_it) > n:  # another run may have the same memory
                    pool = Pool(pool.tokens.clone(), pool.scores.clone(), pool.parents.clone())
                pools |= {i: pool.of_text(j) for j, i in enumerate(own)}
        return pools

    def _variant(self, launch: Launch) -> Variant | None:
        """Return how the draft head is run in a cycle; None: not together with others."""
        spec, drafter = launch.spec, launch.drafter
        if not isinstance(drafter, EagleDrafter) or drafter.head is not self.head:
            return None
        if not isinstance(spec.shape, TreeShape | FusedShape) or not spec.extends:
            return None
        kind = SamplingMode(greedy=spec.kind.greedy or drafter.noise == "none")
        sizes = spec.width, spec.shape.levels, spec.shape.topk
        return Variant(0, *sizes, kind, drafter.cache.n_slots)

    @torch.no_grad()
    def launch_all(
        self, state: DecodeState, drafter: EagleDrafter, specs: Sequence[CycleSpec]
    ) -> None:
        """Launch the kernels of each number of texts; only the launches matter."""
        kinds = SamplingMode(), SamplingMode(greedy=False)
        for spec, kind in itertools.product(specs, kinds):
            own = dataclasses.replace(spec, kind=kind)
            if (variant := self._variant(Launch(own, drafter, None))) is None:
                continue
            for n in variant.sizes:
                shared = SharedDraft(drafter, variant._replace(n_texts=n), state.features)
                shared.launch_all()


def _eagle(launch: Launch) -> EagleDrafter:
    assert isinstance(launch.drafter, EagleDrafter), "see CudaDraft._variant"
    return launch.drafter
