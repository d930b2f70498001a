"""N-gram lookup: a chain copied from an earlier occurrence of the text's last tokens.

Needs no training and no features. Shapes: D tokens of the chain.
"""

from __future__ import annotations

import torch

from fasteagle.drafting.base import Drafter
from fasteagle.drafting.lookup import Lookup
from fasteagle.shapes import AnyShape, TreeShape
from fasteagle.state import CycleSpec, DecodeState
from fasteagle.tree import DraftTree, chain

NGRAM_TOKENS = 7  # tokens copied in a row by default


class NgramDrafter(Drafter):
    """Drafter that copies what followed the latest of the longest matches of the text's end."""

    name = "ngram"
    reads_features = False
    always_proposes = False

    def __init__(self, depth: int = NGRAM_TOKENS, lookup: Lookup | None = None) -> None:
        self.shape: AnyShape = TreeShape(depth, 1, depth)
        self.lookup: Lookup = lookup or Lookup()

    @property
    def head_gain(self) -> None:
        """Gain of the draft head: None, since there is none."""
        return None

    def propose(self, prediction: None, state: DecodeState, spec: CycleSpec) -> DraftTree:
        assert isinstance(spec.shape, TreeShape), "the engine asks for shapes of this drafter"
        tokens, _ = self.ops.look_up(self.lookup, state.text, state.seq_len, spec.depth)
        rows = torch.cat((state.root, tokens))
        return chain(rows, rows >= 0)
