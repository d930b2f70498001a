"""N-gram lookup: a chain copied from where the text's last few tokens stood before.

Needs no training and no features. Shapes: N slots of the text.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fasteagle.drafting.base import Controlled
from fasteagle.model import KVCache
from fasteagle.shapes import AnyShape, TreeShape
from fasteagle.state import Committed, CycleSpec, DecodeState
from fasteagle.tree import DraftTree, chain


class NgramDrafter(Controlled):
    """Proposes what followed the latest earlier place of the longest matching end of the text."""

    name = "ngram"
    reads_features = False
    always_proposes = False

    def __init__(self, depth: int = 7, longest: int = 3, shortest: int = 1) -> None:
        self.shape: AnyShape = TreeShape(depth, 1, depth)
        self._longest, self._shortest = longest, shortest
        self.caches: list[KVCache] = []

    def reserve(self, n_tokens: int) -> None:
        """It keeps nothing but the text, which is the state's."""

    def extend(self, new: Committed, seq_len: Tensor) -> None:
        """The text itself is all that it reads."""

    def propose(self, prediction: None, state: DecodeState, spec: CycleSpec) -> DraftTree:
        assert spec.shape is not None, "the engine asks for a tree"
        found, valid = self.lookup(state.text, state.seq_len, spec.depth)
        root_valid = torch.ones_like(valid[:1])
        return chain(torch.cat((state.root, found)), torch.cat((root_valid, valid)))

    def lookup(self, text: Tensor, last: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """The tokens [depth] that followed, and which of them are there.

        `text` [N] holds the tokens, the last one at `last` (0-d).
        """
        at = torch.arange(text.shape[0], device=text.device)  # where an earlier match may end
        alive = at < last
        size = torch.zeros_like(at)  # tokens that match, counted from the end
        for back in range(self._longest):
            wanted = text.index_select(0, (last - back).clamp(min=0).unsqueeze(0))
            alive = alive & (at >= back) & (text.roll(back) == wanted)
            size = size + alive
        score = torch.where(size >= self._shortest, size * text.shape[0] + at, -1)
        end = score.argmax(0, keepdim=True)
        source = end + 1 + torch.arange(depth, device=text.device)
        valid = (score.index_select(0, end) >= 0) & (source <= last)
        return text[source.clamp(max=text.shape[0] - 1)], valid
