"""N-gram lookup: a chain copied from where the text's last few tokens stood before.

Needs no training and no features. Shapes: D tokens of the chain.
"""

from __future__ import annotations

import copy
from typing import Self

import torch
from torch import Tensor

from fasteagle.drafting.base import Controlled
from fasteagle.drafting.lookup import Corpus, Lookup
from fasteagle.drafting.plan import AnyPlan
from fasteagle.drafting.sure_chain import ChainPlan, LookedUp, LookupChainController
from fasteagle.model import KVCache
from fasteagle.shapes import AnyShape, TreeShape
from fasteagle.state import Committed, CycleSpec, DecodeState
from fasteagle.tree import DraftTree, chain

NGRAM_TOKENS = 7  # that are copied in a row, unless asked otherwise


class NgramDrafter(Controlled):
    """Proposes what followed the latest earlier place of the longest matching end of the text.

    With a `corpus`, what followed there if it matches more tokens.
    """

    name = "ngram"
    reads_features = False
    always_proposes = False

    def __init__(
        self,
        depth: int = NGRAM_TOKENS,
        longest: int = 3,
        shortest: int = 1,
        corpus: Corpus | None = None,
    ) -> None:
        self.shape: AnyShape = TreeShape(depth, 1, depth)
        self.lookup = Lookup(1, longest, shortest, corpus)
        self.caches: list[KVCache] = []
        self.looked_up = LookedUp()  # in chains, on CPUs

    @property
    def advanced(self) -> list[Tensor]:
        return self.looked_up.tensors

    def apart(self) -> Self:
        other = super().apart()
        other.looked_up = copy.deepcopy(self.looked_up)
        return other

    def follow(self, plan: AnyPlan) -> None:
        if isinstance(plan, ChainPlan):
            self.controller = LookupChainController(plan)
        else:
            super().follow(plan)

    @property
    def head_gain(self) -> None:
        """No draft head promises anything."""
        return None

    def reserve(self, n_tokens: int) -> None:
        """It keeps nothing but the text, which is the state's."""

    def extend(self, new: Committed, seq_len: torch.Tensor) -> None:
        """The text itself is all that it reads."""

    def propose(self, prediction: None, state: DecodeState, spec: CycleSpec) -> DraftTree:
        assert isinstance(spec.shape, TreeShape), "the engine asks for shapes of this drafter"
        found = self.lookup.find(state.text, state.seq_len, spec.depth).tokens[0]  # [D]
        rows = torch.cat((state.root, found))
        return chain(rows, rows >= 0)
