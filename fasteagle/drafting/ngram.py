"""N-gram lookup: a chain copied from where the text's last few tokens stood before.

Needs no training and no features. Shapes: D tokens of the chain.
"""

from __future__ import annotations

import torch

from fasteagle.drafting.base import Controlled
from fasteagle.drafting.lookup import Corpus, Lookup
from fasteagle.model import KVCache
from fasteagle.shapes import AnyShape, TreeShape
from fasteagle.state import Committed, CycleSpec, DecodeState
from fasteagle.tree import DraftTree, chain


class NgramDrafter(Controlled):
    """Proposes what followed the latest earlier place of the longest matching end of the text.

    With a `corpus`, what followed there if it matches more tokens.
    """

    name = "ngram"
    reads_features = False
    always_proposes = False

    def __init__(
        self, depth: int = 7, longest: int = 3, shortest: int = 1, corpus: Corpus | None = None
    ) -> None:
        self.shape: AnyShape = TreeShape(depth, 1, depth)
        self.lookup = Lookup(1, longest, shortest, corpus)
        self.caches: list[KVCache] = []

    def reserve(self, n_tokens: int) -> None:
        """It keeps nothing but the text, which is the state's."""

    def extend(self, new: Committed, seq_len: torch.Tensor) -> None:
        """The text itself is all that it reads."""

    def propose(self, prediction: None, state: DecodeState, spec: CycleSpec) -> DraftTree:
        assert spec.shape is not None, "the engine asks for a tree"
        found = self.lookup.find(state.text, state.seq_len, spec.depth).tokens[0]  # [D]
        rows = torch.cat((state.root, found))
        return chain(rows, rows >= 0)
